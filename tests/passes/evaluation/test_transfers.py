"""Messages between devices, and transfers to and from the host's memory."""

import pytest

from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.intervals import CollectiveTime
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.step_time import predict
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.evaluation.transfers import FROM_HOST, TO_HOST, Transfer, find_transfer
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.estimates import roofline
from dhelix.profiles.estimates.estimator import Estimator
from dhelix.profiles.hardware import A100, H200
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import Profile, Section, Timing

MIB = 2**20
BIG, HOST = "f32[1048576]", "f32[1048576]{0:S(5)}"  # 4 MiB
PAIRS = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}"
MESSAGE = f"""
  tok = token[] after-all()
  s = (bf16[8192,8192], u32[], token[]) send(a, tok), channel_id=1, {PAIRS}
  r = (bf16[8192,8192], u32[], token[]) recv(tok), channel_id=1, {PAIRS}
  d = bf16[8192,8192] dot(a, a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  rd = (bf16[8192,8192], token[]) recv-done(r), channel_id=1
  sd = token[] send-done(s), channel_id=1
  ROOT g = bf16[8192,8192] get-tuple-element(rd), index=0
"""
OFFLOAD = f"""
  p = {BIG} parameter(1)
  cs = ({HOST}, {BIG}, u32[]) copy-start(p)
  d = bf16[8192,8192] dot(a, a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  cd = {HOST} copy-done(cs)
  ROOT t = ({HOST}, bf16[8192,8192]) tuple(cd, d)
"""


def module(body: str, before: str = "") -> HloModule:
    header = "HloModule m, is_scheduled=true, num_partitions=4\n\n"
    return HloModule.from_text(f"{header}{before}\nENTRY main {{\n  a = bf16[8192,8192] parameter(0)\n{body}\n}}\n")


def named(program: HloModule, name: str) -> Instruction:
    return next(i for i in program.entry.instructions if i.name == name)


def played(program: HloModule) -> CollectiveTime:
    (found,) = simulate_module(program, H200).collectives
    return found


def test_a_message_counts_once_for_both_ends_of_its_channel() -> None:
    program = module(MESSAGE)
    assert find_transfer(named(program, "r")) == Transfer("send/recv", 128 * MIB, ((0, 1), (1, 2)))
    assert find_transfer(named(program, "s")) is None
    assert find_transfer(named(program, "rd")) is None
    cost = Costs(H200)[named(program, "r")]
    assert (cost.lane, cost.bytes) == (Lane.COMM, 128 * MIB)
    assert cost.seconds == roofline.collective_seconds("collective-permute", 128 * MIB, 2, 1, H200)
    assert Costs(H200)[named(program, "s")].seconds == 0.0


def test_a_message_lies_under_what_computes_before_its_done() -> None:
    found = played(module(MESSAGE))
    assert [name for name, _ in found.under] == ["d"] and found.hidden > 10 * found.exposed


def test_a_message_whose_other_end_is_elsewhere_counts_where_it_is() -> None:
    alone = "\n".join(line for line in MESSAGE.splitlines() if not line.startswith(("  r =", "  rd", "  ROOT")))
    program = module(f"{alone}\n  ROOT n = bf16[8192,8192] negate(d)")
    assert find_transfer(named(program, "s")) == Transfer("send", 128 * MIB, ((0, 1), (1, 2)))
    assert played(program).instruction == "s"


def test_a_message_between_nodes_takes_the_network() -> None:
    program = module(MESSAGE.replace("{{0,1},{1,2}}", "{{7,8}}"))
    assert Costs(H200)[named(program, "r")].between_nodes


def test_a_copy_to_the_host_has_a_lane_and_a_rate_of_its_own() -> None:
    program = module(OFFLOAD)
    start = named(program, "cs")
    assert find_transfer(start) == Transfer(TO_HOST, 4 * MIB, host=True)
    cost = Costs(H200)[start]
    assert cost.lane is Lane.HOST and cost.seconds == roofline.host_seconds(4 * MIB, H200)
    assert cost.seconds > 4 * MIB / H200.host_bandwidth > 4 * MIB / 63e9
    assert Costs(A100)[start].seconds > 2 * cost.seconds, "over an older PCIe"
    found = played(program)
    assert (found.lane, found.exposed) == (Lane.HOST, 0.0) and found.hidden == pytest.approx(cost.seconds)


def test_a_transfer_and_a_collective_do_not_wait_for_each_other() -> None:
    both = OFFLOAD.replace("  d =", "  g = bf16[8192,8192] all-reduce(a), to_apply=add\n  d =")
    add = "add {\n  x = bf16[] parameter(0)\n  y = bf16[] parameter(1)\n  ROOT z = bf16[] add(x, y)\n}\n"
    timeline = simulate_module(module(both, add), H200)
    copied = next(c for c in timeline.collectives if c.lane is Lane.HOST)
    assert copied.hidden + copied.exposed == pytest.approx(copied.alone)


def test_copies_within_one_memory_are_no_transfers() -> None:
    for line in (
        f"cs = ({BIG}, {BIG}, u32[]) copy-start(p)\n  ROOT c = {BIG} copy-done(cs)",
        f"ROOT c = {BIG} copy(p)",
    ):
        program = module(f"  p = {BIG} parameter(1)\n  {line}")
        assert not any(map(find_transfer, program.entry.instructions))
    program = module(f"  p = {HOST} parameter(1)\n  ROOT c = {HOST} copy(p)")
    assert not any(map(find_transfer, program.entry.instructions))


SLICE = """slice {
  b = f32[8,1048576]{1,0:S(5)} parameter(0)
  i = s32[] parameter(1)
  z = s32[] constant(0)
  n = s32[] add(i, z)
  ROOT s = f32[1,1048576]{1,0} dynamic-slice(b, n, z), dynamic_slice_sizes={1,1048576}
}
"""
UPDATE = """update {
  b = f32[8,1048576]{1,0:S(5)} parameter(0)
  u = f32[1,1048576]{1,0} parameter(1)
  i = s32[] parameter(2)
  z = s32[] constant(0)
  ROOT s = f32[8,1048576]{1,0:S(5)} dynamic-update-slice(b, u, i, z)
}
"""
STACK = """  b = f32[8,1048576]{1,0:S(5)} parameter(1)
  i = s32[] parameter(2)
"""


@pytest.mark.parametrize(
    ("before", "body", "kind"),
    [
        (SLICE, f"{STACK}  ROOT t = f32[1,1048576]{{1,0}} fusion(b, i), kind=kLoop, calls=slice", FROM_HOST),
        (
            UPDATE,
            f"{STACK}  u = f32[1,1048576]{{1,0}} parameter(3)\n"
            "  ROOT t = f32[8,1048576]{1,0:S(5)} fusion(b, u, i), kind=kLoop, calls=update",
            TO_HOST,
        ),
        (
            "",
            f"{STACK}  ROOT t = f32[1,1048576]{{1,0}} dynamic-slice(b, i, i), dynamic_slice_sizes={{1,1048576}}",
            FROM_HOST,
        ),
        ("", f'  p = {BIG} parameter(1)\n  ROOT t = {BIG} custom-call(p), custom_call_target="MoveToHost"', TO_HOST),
    ],
)
def test_slices_of_buffers_of_the_host_count_as_slices(before: str, body: str, kind: str) -> None:
    program = module(body, before)
    assert find_transfer(named(program, "t")) == Transfer(kind, 4 * MIB, host=True)
    assert Costs(H200)[named(program, "t")].lane is Lane.HOST


def test_a_kernel_that_computes_with_values_of_the_host_waits_for_them() -> None:
    negate = SLICE.replace("ROOT s", "s").replace("}\n}", "}\n  ROOT m = f32[1,1048576]{1,0} negate(s)\n}")
    program = module(f"{STACK}  ROOT t = f32[1,1048576]{{1,0}} fusion(b, i), kind=kLoop, calls=slice", negate)
    cost = Costs(H200)[named(program, "t")]
    assert (cost.lane, cost.seconds) == (Lane.COMPUTE, roofline.host_seconds(4 * MIB, H200))


def test_no_profile_knows_transfers_but_a_step_without_overlap_counts_them() -> None:
    for program, name, size in ((module(OFFLOAD), "cs", 4 * MIB), (module(MESSAGE), "r", 128 * MIB)):
        assert key_of(named(program, name)) is None
        step = predict(program, Costs(H200))
        (counted,) = [o for o in step.operators if "transfer:" in str(o.key)]
        assert counted.key.sizes == (size,) and counted.seconds == Costs(H200)[named(program, name)].seconds  # type: ignore[union-attr]


GROUPED = """grouped {
  p = f32[1048576] parameter(0)
  q = f32[1024] parameter(1)
  x = f32[1048576] all-reduce(p), to_apply=add, replica_groups={{0,1}}, channel_id=1, use_global_device_ids=true
  y = f32[2048] all-gather(q), dimensions={0}, replica_groups={{0,1}}, channel_id=2, use_global_device_ids=true
  ROOT t = (f32[1048576], f32[2048]) tuple(x, y)
}
"""
SUM = "add {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n  ROOT z = f32[] add(x, y)\n}\n"


def test_collectives_that_begin_together_take_as_long_as_all_of_them() -> None:
    start = "s = ((f32[1048576], f32[1024]), (f32[1048576], f32[2048])) async-start(p, q), calls=grouped"
    program = module(
        f"  p = {BIG} parameter(1)\n  q = f32[1024] parameter(2)\n  {start}\n"
        "  ROOT e = (f32[1048576], f32[2048]) async-done(s)",
        SUM + GROUPED,
    )
    reduce, gather = CollectiveKey("all-reduce", 4 * MIB, 2), CollectiveKey("all-gather", 8192, 2)
    guess = Costs(H200)[named(program, "s")]
    assert guess.seconds == sum(roofline.collective_seconds(k.kind, k.bytes, 2, 1, H200) for k in (reduce, gather))
    section = Section("default", {}, {reduce: Timing(1.0), gather: Timing(2.0)})
    profile = Profile("H200", "nvlink").with_section(section)
    assert Costs(H200, Estimator(profile, H200))[named(program, "s")].seconds == 3.0
