"""Costs of instructions of scheduled GPU programs, and the device groups of collectives."""

import dataclasses
from typing import Any

import pytest

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import device_groups, find_collective
from dhelix.passes.analysis.execution import sequence_of, trip_count
from dhelix.passes.evaluation.costs import BY_THEMSELVES, CostModel, Costs, PowerLimit
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.roofline_costs import Lane, instruction_cost
from dhelix.passes.evaluation.timeline import evaluate, settled
from dhelix.passes.framework.fingerprint import input_fingerprint
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule
from dhelix.profiles.estimates import roofline
from dhelix.profiles.estimates.contention import MIN_RATE
from dhelix.profiles.estimates.estimator import Estimator, Source
from dhelix.profiles.files.storage import dumps, loads
from dhelix.profiles.hardware import H200, H200_NO_P2P, SYMMETRIC_RATE
from dhelix.profiles.keys import CollectiveKey, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Section, Timing
from dhelix.tests.passes import golden

MODULE = HloModule.from_text(golden.read("costs/operators.hlo"))
COSTS = Costs(H200)
MIB = 2**20


def named(name: str) -> Instruction:
    return next(i for i in MODULE.entry.instructions if i.name == name)


def test_slices_count_as_slices() -> None:
    assert COSTS[named("fused_slice")].bytes == 4 * MIB + 4 * MIB + 4
    assert COSTS[named("fused_save")].bytes == 4 * MIB + 4 * MIB + 4


def test_products_count_their_operations() -> None:
    assert COSTS[named("triton")].flops == 2 * 512 * 128 * 256
    batched = COSTS[named("gemm")]
    assert batched.flops == 2 * 2 * 512 * 128 * 256
    assert batched.bytes == 2 * 2 * (512 * 256 + 256 * 128 + 512 * 128), "the workspace is no traffic"
    assert batched.seconds == roofline.gemm_seconds(batched.flops, batched.bytes, H200)


def test_attention_is_halved_by_a_causal_mask() -> None:
    scores = 8 * 4096 * 4096
    assert COSTS[named("forward")].flops == 2 * 2 * scores * 128 / 2
    assert COSTS[named("backward")].flops == 2 * 5 * scores * 128 / 2


@pytest.mark.parametrize(
    ("name", "kind", "size", "group", "between_nodes"),
    [
        ("gather", "all-gather", 65536, 4, False),
        ("scatter", "reduce-scatter", 65536, 4, False),
        ("across", "all-reduce", 16384, 2, True),
        ("fused_reduce", "all-reduce", 16384, 2, False),
        ("shifted", "collective-permute", 16384, 2, False),
    ],
)
def test_collectives(name: str, kind: str, size: int, group: int, between_nodes: bool) -> None:
    collective = find_collective(named(name))
    assert collective is not None
    assert (collective.kind, collective.size, collective.group_size(1)) == (kind, size, group)
    cost = COSTS[named(name)]
    assert (cost.lane, cost.between_nodes) == (Lane.COMM, between_nodes)
    assert cost.bytes == roofline.wire_bytes(kind, size, group)


def test_a_done_costs_nothing_and_is_no_collective() -> None:
    assert COSTS[named("gathered")].seconds == 0.0
    assert find_collective(named("gathered")) is None
    assert find_collective(named("triton")) is None


def test_a_loop_costs_its_iterations() -> None:
    loop = named("loop")
    assert trip_count(loop) == 5
    body = instruction_cost(loop.called[0].instructions[3], H200)
    assert COSTS[loop].seconds == pytest.approx(5 * body.seconds)
    assert COSTS[loop].bytes == 5 * 8 * MIB


def test_what_only_renames_is_free() -> None:
    free = [i for i in MODULE.entry.instructions if i.opcode in ("parameter", "tuple", "get-tuple-element")]
    assert all(COSTS[i].seconds == 0.0 for i in free)


def with_profile(**seconds: float) -> Costs:
    """Costs from a profile that holds the named instructions."""
    known = {key_of(named(name)): Timing(value) for name, value in seconds.items()}
    operators = {k: t for k, t in known.items() if isinstance(k, OperatorKey)}
    collectives = {k: t for k, t in known.items() if isinstance(k, CollectiveKey)}
    profile = Profile("H200", "nvlink").with_section(Section("default", operators, collectives))
    return Costs(H200, Estimator(profile, H200))


def test_without_a_profile_everything_is_a_guess() -> None:
    assert COSTS[named("gemm")].source is Source.GUESS
    assert COSTS[named("loop")].source is Source.GUESS
    assert COSTS[named("gathered")].source is Source.MEASURED, "nothing is nothing"


def test_measured_times_take_the_place_of_the_roofline() -> None:
    costs = with_profile(gemm=1.0, gather=2.0)
    for name, seconds in (("gemm", 1.0), ("gather", 2.0)):
        cost, guess = costs[named(name)], COSTS[named(name)]
        assert (cost.seconds, cost.source) == (seconds, Source.MEASURED)
        assert (cost.flops, cost.bytes, cost.lane) == (guess.flops, guess.bytes, guess.lane)
    assert costs[named("gathered")].seconds == 0.0
    assert costs[named("forward")].source is Source.GUESS


def test_times_follow_from_near_relatives() -> None:
    key = key_of(named("gemm"))
    assert isinstance(key, OperatorKey)
    sizes = (2 * key.sizes[0], *key.sizes[1:])
    relative = dataclasses.replace(key, sizes=sizes, flops=2 * key.flops, bytes=2 * key.bytes)
    profile = Profile("H200", "nvlink").with_section(Section("default", {relative: Timing(1.0)}))
    cost = Costs(H200, Estimator(profile, H200))[named("gemm")]
    assert cost.source is Source.INTERPOLATED
    assert COSTS[named("gemm")].seconds < cost.seconds < 1.0


def test_a_loop_is_as_certain_as_its_least_certain_part() -> None:
    copy = named("loop").called[0].instructions[3]
    key = key_of(copy)
    assert isinstance(key, OperatorKey)
    profile = Profile("H200", "nvlink").with_section(Section("default", {key: Timing(3.0)}))
    loop = Costs(H200, Estimator(profile, H200))[named("loop")]
    assert (loop.seconds, loop.source) == (15.0, Source.MEASURED)
    assert with_profile(gemm=1.0)[named("loop")].source is Source.GUESS


def measured_pair(first: str, second: str, timing: PairTiming, setting: str = "default") -> Profile:
    """A profile that holds only this pair."""
    one, two = key_of(named(first)), key_of(named(second))
    assert one is not None and two is not None
    return Profile("H200", "nvlink").with_section(Section(setting, pairs={PairKey(one, two): timing}))


# Both take 3 s alone. The one launched first runs at full rate, the other one at a third.
PAIR = PairTiming(5.0, 3.0, 5.0, 3.0, 3.0)


def test_rates_are_those_of_the_pair_in_its_order() -> None:
    times = with_profile(gemm=3.0, gather=3.0).estimator
    assert times is not None
    for pair, collective_first in (("gather", "gemm"), True), (("gemm", "gather"), False):
        profile = measured_pair(*pair, PAIR).with_section(times.section)
        costs = Costs(H200, Estimator(profile, H200))
        rates = costs.rates(named("gemm"), named("gather"), collective_first)
        assert rates == pytest.approx((1 / 3, 1.0) if collective_first else (1.0, 1 / 3))
        other = costs.rates(named("gemm"), named("gather"), not collective_first)
        assert other == (H200.compute_rate, H200.communication_rate), "the other order is a guess"


def test_rates_without_a_measured_pair_are_the_constants_of_the_hardware() -> None:
    constants = H200.compute_rate, H200.communication_rate
    known = Costs(H200, Estimator(measured_pair("gather", "gemm", PAIR), H200))
    assert COSTS.rates(named("gemm"), named("gather"), True) == constants
    assert with_profile(gemm=1.0, gather=2.0).rates(named("gemm"), named("gather"), True) == constants
    assert known.rates(named("loop"), named("gather"), True) == constants, "control flow has no key"
    symmetric = Costs(H200, Estimator(measured_pair("gather", "gemm", PAIR), H200), "symmetric")
    assert symmetric.rates(named("gemm"), named("gather"), True) == (H200.compute_rate, SYMMETRIC_RATE)


def test_a_starved_side_still_proceeds() -> None:
    starved = PairTiming(9.0, 9.0, 3.0, 3.0, 3.0)
    costs = CostModel(measured_pair("gather", "gemm", starved)).costs()
    assert costs.rates(named("gemm"), named("gather"), True) == (1.0, MIN_RATE)


def test_a_cost_model_is_a_profile_under_one_setting() -> None:
    gathers = {CollectiveKey("all-gather", 65536, 4, groups=2, implementation="symmetric"): Timing(7.0)}
    profile = Profile("H200", "no-p2p").with_section(Section("copy-engine", collectives=gathers))
    model = CostModel(profile, "copy-engine")
    costs = model.costs()
    assert (model.hardware, costs.hardware) == (H200_NO_P2P, H200_NO_P2P)
    assert costs[named("gather")].seconds == 7.0, "collectives run as the setting says"


def test_the_costs_of_a_cost_model_are_those_of_a_step() -> None:
    """A cost model adds the setting's pauses, the waits of collectives over NVLink, and the power limit if known."""
    section = Section("default", gap_seconds=3e-6)
    assert Costs(H200).in_step == BY_THEMSELVES
    hosted = CostModel(Profile("H200", "no-p2p").with_section(section)).costs().in_step
    nvlink = CostModel(measured_pair("gather", "gemm", PAIR).with_section(section)).costs().in_step
    assert hosted.pause == nvlink.pause == 3e-6 and hosted.wait == 0.0 < nvlink.wait
    assert nvlink.power is not None and nvlink.clock == 1.0
    assert CostModel(Profile("A100", "nvlink").with_section(section)).costs().in_step.power is None, "not known"


def test_a_step_settles_where_its_load_and_its_clock_agree() -> None:
    power = PowerLimit(free=0.4, slope=2.0, communication=0.1)
    assert power.clock(0.4, 1.0, 0.8) == 1.0 < power.clock(0.41, 1.0, 0.8)
    assert power.clock(0.5, 2.0, 0.0) == pytest.approx(1.0 + 2.0 * 0.1), "its length does not follow the clock"
    for load, seconds, slower in ((0.5, 1.0, 0.8), (0.7, 3.0, 3.0), (0.45, 0.1, 0.02)):
        clock = power.clock(load, seconds, slower)
        assert clock == pytest.approx(1.0 + 2.0 * (load * seconds / (seconds + (clock - 1.0) * slower) - 0.4))


def test_a_module_settles_at_the_clock_that_its_load_leaves() -> None:
    gemm, gather = named("gemm"), named("gather")
    module, keys = gemm.computation.module, (key_of(gemm), key_of(gather))
    assert isinstance(keys[0], OperatorKey) and isinstance(keys[1], CollectiveKey)
    section = Section("default", {keys[0]: Timing(5e-3)}, {keys[1]: Timing(1e-3)})
    costs = CostModel(Profile("H200", "nvlink").with_section(section)).costs()
    assert settled(module, costs) is costs, "with a product this slow it has rest"
    power = PowerLimit(free=0.01, slope=1.0, communication=0.1)
    costs.in_step = dataclasses.replace(costs.in_step, power=power)
    found = settled(module, costs)
    seconds = evaluate(sequence_of(module.entry), found).seconds
    work = [costs[i].flops / H200.peak_flops + 0.1 * costs[i].communication for i in sequence_of(module.entry)]
    assert 1.01 < found.in_step.clock == pytest.approx(1.0 + sum(work) / seconds - 0.01)
    known = Costs(H200)
    assert settled(module, known) is known, "nothing is known of a roofline's clock"


def test_only_copy_engines_stop_compute_and_only_products_and_attention_follow_the_clock() -> None:
    gather, gemm, copy = named("gather"), named("gemm"), named("loop").called[0].instructions[3]
    keys = key_of(gather), key_of(gemm), key_of(copy)
    assert isinstance(keys[0], CollectiveKey) and isinstance(keys[1], OperatorKey) and isinstance(keys[2], OperatorKey)
    by_copy_engines = dataclasses.replace(keys[0], implementation="symmetric")
    timings = {keys[1]: Timing(1.0), keys[2]: Timing(1.0)}, {keys[0]: Timing(1.0), by_copy_engines: Timing(1.0)}
    profile = Profile("H200", "nvlink").with_section(Section("copy-engine1", *timings))
    profile = profile.with_section(Section("connections1", *timings))
    costs, kernels = (CostModel(profile, setting).costs() for setting in ("copy-engine1", "connections1"))
    assert costs[gather].launch > 0.0 == costs[gemm].launch == kernels[gather].launch
    slower = costs.at_clock(1.25)
    assert [slower[i].seconds for i in (gather, gemm, copy)] == [1.0, 1.25, 1.0]
    assert slower[gather] == costs[gather]


def test_a_running_collective_is_met_as_under_one_connection() -> None:
    starved = PairTiming(6.0, 6.0, 3.0, 3.0, 3.0)
    both = measured_pair("gather", "gemm", starved)
    for section in measured_pair("gather", "gemm", PAIR, "connections1").sections.values():
        both = both.with_section(section)
    costs = Costs(H200, Estimator(both, H200))
    assert costs.rates(named("gemm"), named("gather"), True) == (1.0, MIN_RATE)
    assert costs.rates(named("gemm"), named("gather"), True, running=True) == pytest.approx((1 / 3, 1.0))
    alone = Costs(H200, Estimator(measured_pair("gather", "gemm", starved), H200))
    assert alone.rates(named("gemm"), named("gather"), True, running=True) == (1.0, MIN_RATE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("H200", "nothing"), "no profile of H200 with link nothing: run `dhelix profile`"),
        (("H200", "nvlink", "nothing"), "no measurements under launch setting 'nothing': run `dhelix profile`"),
    ],
)
def test_a_cost_model_that_nobody_measured(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DhelixError, match=message):
        CostModel.find(*arguments)


def test_a_cost_model_counts_for_the_fingerprint() -> None:
    def fingerprint(*models: CostModel) -> set[str]:
        return {input_fingerprint([CollectiveSchedule(model=model)]) for model in models}

    profile = measured_pair("gather", "gemm", PAIR).with_section(Section("connections1"))
    later = measured_pair("gather", "gemm", dataclasses.replace(PAIR, second=5.5)).with_section(Section("connections1"))
    assert len(fingerprint(CostModel(profile), CostModel(loads(dumps(profile), "again")))) == 1
    assert len(fingerprint(CostModel(profile), CostModel(later), CostModel(profile, "connections1"))) == 3


LOWERED = """HloModule m
ENTRY e {
  a = f32[1024,1024] parameter(0)
  scalar = f32[] constant(2)
  wide = f32[1024,1024] broadcast(scalar), dimensions={}
  twice = f32[1024,1024] multiply(a, wide)
  ROOT c = f32[1024,1024] dot(a, twice), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""


def test_lowered_programs_pay_for_products_and_for_what_they_write() -> None:
    costs = {i.name: instruction_cost(i, H200) for i in HloModule.from_text(LOWERED).entry.instructions}
    assert costs["wide"].seconds == costs["scalar"].seconds == 0.0
    assert costs["twice"].bytes == 4 * MIB
    assert costs["c"].flops == 2 * 1024**3


def test_profiles_are_for_scheduled_programs() -> None:
    module = HloModule.from_text(LOWERED)
    key = key_of(module.entry.root)
    assert isinstance(key, OperatorKey)
    profile = Profile("H200", "nvlink").with_section(Section("default", {key: Timing(1.0)}))
    costs = Costs(H200, Estimator(profile, H200))
    assert costs[module.entry.root] == instruction_cost(module.entry.root, H200)


GROUPS = {
    "{{0,1},{2,3}}": ((0, 1), (2, 3)),
    "[2,2]<=[4]": ((0, 1), (2, 3)),
    "[2,2]<=[2,2]T(1,0)": ((0, 2), (1, 3)),
    "mesh['dp'=2,'tp'=2] {'tp'}": ((0, 1), (2, 3)),
    "mesh['dp'=2,'tp'=2] {'dp'}": ((0, 2), (1, 3)),
    "mesh['dp'=2,'tp'=2] {'dp','tp'}": ((0, 1, 2, 3),),
    "mesh['dp'=1,'tp'=4] {'tp':(1)2}": ((0, 2), (1, 3)),
    "mesh['dp'=1,'tp'=4] {'tp':(2)2}": ((0, 1), (2, 3)),
    "mesh['dp'=2,'tp'=2], device_ids=(3,2,1,0) {'tp'}": ((3, 2), (1, 0)),
    "mesh['dp'=2,'tp'=2], device_ids=([2,2]T(1,0)) {'tp'}": ((0, 2), (1, 3)),
}


REDUCE = """HloModule m
sum {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}
ENTRY e {
  p = f32[8] parameter(0)
  ROOT r = f32[8] all-reduce(p), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true, to_apply=sum
}"""


@pytest.mark.parametrize("written", GROUPS)
def test_device_groups_in_every_form(written: str) -> None:
    root = HloModule.from_text(REDUCE.replace("GROUPS", written)).entry.root
    assert device_groups(root) == GROUPS[written]
