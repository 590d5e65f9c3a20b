"""The choice between a collective matmul and a collective that the other strand's compute hides."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from dhelix.passes.communication.collective_matmul.pattern import Pattern, Placed
from dhelix.passes.communication.collective_matmul.site_choice import MOST, Candidate, Trial, Weighed, choose, mark
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.collective_schedule import list_order
from dhelix.passes.ordering.strand_pairing import pairing_order
from dhelix.profiles.collective_matmul.estimates import collective_key, gemm_key
from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form, Site, SiteTimes, Times
from dhelix.profiles.keys import CollectiveKey, OperatorKey
from dhelix.profiles.profile import Profile, Section, Timing
from dhelix.tests.passes import golden
from dhelix.tests.passes.communication.collective_matmul.forms import TextForms

KERNEL = Form("mosaic")
WIDE, NARROW = (
    Placed(
        Pattern(Site("all_gather_matmul", 8192, k, 4096, "bfloat16", 2), 1, (k,), (4096,), False, False, (1, 2, 1)),
        True,
    )
    for k in (8192, 4096)
)
ALONE = Placed(NARROW.pattern, co_executed=False)
CALL = (
    'custom-call({}), custom_call_target="__cublas$lt$matmul", metadata={{op_name="jit(step)/dot{}"}}, backend_config='
    '{{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"]}}}}}}'
)


def gather(name: str, k: int, number: int) -> str:
    """A computation that gathers an operand of `k` columns, and belongs to site `number`."""
    return f"""{name} {{
  q = bf16[4096,{k}] parameter(0)
  ROOT g = bf16[8192,{k}] all-gather(q), dimensions={{0}}, replica_groups={{{{0,1}}}}, channel_id={number + 1}, use_global_device_ids=true, metadata={{op_name="jit(step)/all_gather/dhelix_site_{number}"}}
}}"""  # noqa: E501


# One strand gathers twice, each time for the next product. The other strand only multiplies, as long as one gather.
TEXT = f"""HloModule m, is_scheduled=true
{gather("wide", 8192, 0)}
{gather("narrow", 4096, 1)}
ENTRY e {{
  x = bf16[4096,8192] parameter(0)
  w = bf16[8192,4096] parameter(1)
  v = bf16[4096,4096] parameter(2)
  y = bf16[2048,4096] parameter(3)
  start = ((bf16[4096,8192]), bf16[8192,8192]) async-start(x), calls=wide
  done = bf16[8192,8192] async-done(start)
  first = bf16[8192,4096] {CALL.format("done, w", "/dhelix_site_0")}
  half = bf16[4096,4096] slice(first), slice={{[0:4096], [0:4096]}}
  start2 = ((bf16[4096,4096]), bf16[8192,4096]) async-start(half), calls=narrow
  done2 = bf16[8192,4096] async-done(start2)
  second = bf16[8192,4096] {CALL.format("done2, v", "/dhelix_site_1")}
  other = bf16[2048,4096] {CALL.format("y, v", "")}
  ROOT result = (bf16[8192,4096], bf16[2048,4096]) tuple(second, other)
}}"""  # noqa: E501
CANDIDATES = [Candidate(WIDE, KERNEL), Candidate(NARROW, KERNEL)]
# The same gather and product twice: alone in a first layer, and in a loop where the other strand multiplies.
PLACES = f"""HloModule m, is_scheduled=true
{gather("first", 4096, 0)}
{gather("second", 4096, 1)}
body {{
  state = (s32[], bf16[4096,4096], bf16[4096,4096], bf16[2048,4096]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  x = bf16[4096,4096] get-tuple-element(state), index=1
  v = bf16[4096,4096] get-tuple-element(state), index=2
  y = bf16[2048,4096] get-tuple-element(state), index=3
  start = ((bf16[4096,4096]), bf16[8192,4096]) async-start(x), calls=second
  done = bf16[8192,4096] async-done(start)
  other = bf16[2048,4096] {CALL.format("y, v", "")}
  product = bf16[8192,4096] {CALL.format("done, v", "/dhelix_site_1")}
  half = bf16[4096,4096] slice(product), slice={{[0:4096], [0:4096]}}
  ROOT after = (s32[], bf16[4096,4096], bf16[4096,4096], bf16[2048,4096]) tuple(i, half, v, other)
}}
condition {{
  state = (s32[], bf16[4096,4096], bf16[4096,4096], bf16[2048,4096]) parameter(0)
  ROOT more = pred[] constant(true)
}}
ENTRY e {{
  i = s32[] parameter(0)
  x = bf16[4096,4096] parameter(1)
  v = bf16[4096,4096] parameter(2)
  y = bf16[2048,4096] parameter(3)
  start = ((bf16[4096,4096]), bf16[8192,4096]) async-start(x), calls=first
  done = bf16[8192,4096] async-done(start)
  product = bf16[8192,4096] {CALL.format("done, v", "/dhelix_site_0")}
  half = bf16[4096,4096] slice(product), slice={{[0:4096], [0:4096]}}
  state = (s32[], bf16[4096,4096], bf16[4096,4096], bf16[2048,4096]) tuple(i, half, v, y)
  ROOT loop = (s32[], bf16[4096,4096], bf16[4096,4096], bf16[2048,4096]) while(state), condition=condition, body=body, backend_config={{"known_trip_count":{{"n":"TRIPS"}}}}
}}"""  # noqa: E501
OTHER = Site("all_gather_matmul", 2048, 4096, 4096, "bfloat16", 2)  # the product of the other strand


def model(kernels: Mapping[Placed, float], other: float = 4e-4) -> CostModel:
    """Products of 1 ms and gathers of 0.4 ms.

    `kernels`: time of a site's kernel relative to its product. `other`: seconds of the other strand's product.
    """
    operators, collectives, sites = {}, {}, {}
    for site, seconds in ((WIDE.pattern.site, 1e-3), (NARROW.pattern.site, 1e-3), (OTHER, other)):
        gemm, gather = gemm_key(site), collective_key(site)
        assert isinstance(gemm, OperatorKey) and isinstance(gather, CollectiveKey)
        operators[gemm], collectives[gather] = Timing(seconds), Timing(4e-4)
    for placed, ratio in kernels.items():
        sites[placed.pattern.site] = SiteTimes(
            Timing(1.0), Timing(1.0), {MONOLITHIC: Timing(2.0), KERNEL: Timing(ratio)}
        )
    profile = Profile("H200", "nvlink").with_section(Section("default", operators, collectives))
    return CostModel(profile, matmuls=Times("H200", "nvlink", sites=sites))


def weighed(kernels: Mapping[Placed, float], other: float = 4e-4, text: str = TEXT) -> Weighed:
    return choose(Trial(HloModule.from_text(text), CANDIDATES, model(kernels, other)), list_order, pairing_order)


def test_where_nothing_hides_a_collective_its_kernel_is_taken() -> None:
    found = weighed({WIDE: 1.02, NARROW: 1.02}, other=1e-6)
    assert (set(found.taken), found.paired) == ({WIDE, NARROW}, ())
    assert found.seconds_taken == found.seconds_all < found.seconds - 4e-4


def test_what_the_other_strand_hides_stays() -> None:
    """The other strand hides one of the two gathers, so the cheaper of the two kernels is taken."""
    found = weighed({WIDE: 1.02, NARROW: 1.41})
    assert (found.taken, found.paired) == ((WIDE,), (NARROW,))
    assert found.seconds_taken < min(found.seconds, found.seconds_all)
    assert weighed({WIDE: 1.41, NARROW: 1.02}).taken == (NARROW,)


@pytest.mark.parametrize("trips", [3, 300])
def test_the_same_pattern_is_decided_for_at_each_place(trips: int) -> None:
    """Each place is decided separately, even if the place without a second strand is a tiny part of the step."""
    trial = Trial(
        HloModule.from_text(PLACES.replace("TRIPS", str(trips))),
        [Candidate(ALONE, KERNEL), Candidate(NARROW, KERNEL)],
        model({NARROW: 1.37}),
    )
    found = choose(trial, list_order, pairing_order)
    assert (found.taken, found.paired) == ((ALONE,), (NARROW,))
    assert found.alone == pytest.approx(1 / (1 + trips), rel=1e-3)
    assert found.seconds_taken < min(found.seconds, found.seconds_all)


def test_a_kernel_that_saves_next_to_nothing_is_not_taken() -> None:
    found = weighed({WIDE: 1.397, NARROW: 1.397}, other=1e-6)
    assert found.taken == () and found.seconds_taken == found.seconds


def test_what_nothing_is_known_of_stays() -> None:
    assert Trial(HloModule.from_text(TEXT), CANDIDATES, model({})).placed == ()
    assert weighed({}).taken == weighed({}).paired == ()


def test_sites_that_cannot_be_told_are_not_weighed() -> None:
    """A site whose collective lost its number is not weighed, for example because XLA combined it with another one."""
    combined = TEXT.replace("all_gather/dhelix_site_0", "all_gather")
    trial = Trial(HloModule.from_text(combined), CANDIDATES, model({WIDE: 1.02, NARROW: 1.02}))
    assert trial.placed == (NARROW,)
    assert trial.seconds((WIDE,), list_order) == trial.seconds((), list_order)


def test_weighing_leaves_the_module_as_it_is() -> None:
    module = HloModule.from_text(TEXT)
    before = module.to_bytes()
    trial = Trial(module, CANDIDATES, model({WIDE: 1.02, NARROW: 1.02}))
    assert trial.seconds((), pairing_order) > trial.seconds(trial.placed, pairing_order)
    assert module.to_bytes() == before


def test_where_no_order_keeps_within_memory_nothing_is_taken() -> None:
    trial = Trial(HloModule.from_text(TEXT), CANDIDATES, model({WIDE: 1.02, NARROW: 1.02}), memory_limit=1)
    found = choose(trial, list_order, pairing_order)
    assert (found.taken, set(found.paired), found.seconds) == ((), {WIDE, NARROW}, math.inf)


def test_the_number_of_evaluations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds even if each flip is faster than everything before."""
    asked: list[frozenset[Placed]] = []

    def seconds(self: Trial, taken: frozenset[Placed], order: object) -> float:
        asked.append(frozenset(taken))
        return 1.0 / len(asked)

    monkeypatch.setattr(Trial, "seconds", seconds)
    weighed({WIDE: 1.02, NARROW: 1.02})
    assert len(asked) <= MOST + MOST // 3 + 5


def test_a_program_that_turns_out_slower_takes_nothing() -> None:
    found = weighed({WIDE: 1.02, NARROW: 1.02}, other=1e-6)
    assert found.checked(0.99 * found.seconds).taken == found.taken
    slower = found.checked(0.999 * found.seconds)
    assert replace(found, taken=(ALONE,), alone=0.1).checked(0.999 * found.seconds).taken == (ALONE,)
    assert (slower.taken, set(slower.paired), slower.seconds_taken) == ((), {WIDE, NARROW}, found.seconds)


@pytest.mark.parametrize("name", golden.files("collective_matmul"))
def test_collectives_and_products_are_marked(name: str) -> None:
    """A site's collective and all of its products get the same number."""
    module = HloModule.from_text(golden.read(name))
    found = mark(module, TextForms())
    names = [i.op_name for c in module.computations for i in c.instructions]
    assert len(found) == 2
    for number, pattern in enumerate(candidate.placed.pattern for candidate in found):
        products = max(len(pattern.columns), len(pattern.contractions))
        assert sum(n.endswith(f"/dhelix_site_{number}") for n in names) == 1 + products


def test_what_takes_no_form_is_not_marked() -> None:
    module = HloModule.from_text(golden.read(golden.files("collective_matmul")[0]))
    assert mark(module, TextForms(least_rows=1 << 20)) == []
    assert not any("dhelix_site" in i.op_name for c in module.computations for i in c.instructions)
