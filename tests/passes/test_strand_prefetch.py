"""The next micro-batch's embedding an iteration earlier, on small HLO modules; compiled steps in test_llama_8b.py."""

import pytest

from dhelix.passes.report import CHANGED, UNCHANGED
from dhelix.passes.strand_prefetch import StrandPrefetch
from dhelix.tests.passes import golden

EMBEDDING = "strand_prefetch/embedding.hlo"
REDUCED = (
    "embedded = f32[4] all-reduce(mine), replica_groups={{0}}, channel_id=1, use_global_device_ids=true, to_apply=sum"
)
COUNT = "count = s32[] constant(4)"


@pytest.mark.parametrize("name", golden.files("strand_prefetch"))
def test_golden(name: str) -> None:
    golden.check(name, StrandPrefetch())


LEFT_ALONE = {
    "one iteration": {COUNT: "count = s32[] constant(1)"},
    "iterations that are not counted": {COUNT: "first = s32[4] get-tuple-element(state), index=2\n"
                                               "few = s32[1] slice(first), slice={[0:1]}\n"
                                               "count = s32[] reshape(few)"},
    "nothing is sent": {REDUCED: "embedded = f32[4] copy(mine)"},
    "what is sent follows from the iteration before": {
        REDUCED: "both = f32[4] add(mine, total)\n" + REDUCED.replace("(mine)", "(both)")},
    "what is sent is the same in all iterations": {
        REDUCED: "first = f32[1,4] slice(table), slice={[0:1], [0:4]}\nof_all = f32[4] reshape(first)\n"
                 + REDUCED.replace("(mine)", "(of_all)")},
    "a product comes before": {
        REDUCED: "product = f32[4] dot(mine, square), lhs_contracting_dims={0}, rhs_contracting_dims={0}\n"
                 + REDUCED.replace("(mine)", "(product)"),
        "row = f32[1,4]": "square = f32[4,4] slice(table), slice={[0:4], [0:4]}\nrow = f32[1,4]"},
    "it is another loop": {"strands = (": "steps = (", "get-tuple-element(strands)": "get-tuple-element(steps)"},
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case: str) -> None:
    before, after, report = golden.run(golden.read(EMBEDDING, LEFT_ALONE[case]), StrandPrefetch())
    assert after is before and report.outcome == UNCHANGED, golden.printed(after)


def test_a_large_lookup_comes_earlier_though_nothing_is_sent_yet() -> None:
    """What the partitioner will make of it is not known."""
    lookup = (
        "ids = s32[1] reshape(t)\nwide = f32[8,524288] broadcast(table), dimensions={0,1}\n"
        "rows = f32[1,524288] gather(wide, ids), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, "
        "index_vector_dim=1, slice_sizes={1,524288}\nfew = f32[1,4] slice(rows), slice={[0:1], [0:4]}\n"
        "embedded = f32[4] reshape(few)"
    )
    edits = {REDUCED: lookup.replace("broadcast(table), dimensions={0,1}", "pad(table, nothing), padding=0_0x0_524284"),
             "one = s32[] constant(1)": "one = s32[] constant(1)\nnothing = f32[] constant(0)"}  # fmt: skip
    before, after, report = golden.run(golden.read(EMBEDDING, edits), StrandPrefetch())
    assert report.outcome == CHANGED
    golden.assert_same_results(before, after)


def test_the_counter_counts_down_or_by_two() -> None:
    for edits in (
        {"next = s32[] add(i, one)": "two = s32[] constant(2)\nnext = s32[] add(i, two)"},
        {"next = s32[] add(i, one)": "next = s32[] subtract(i, one)", "zero = s32[] constant(0)\n  start":
         "zero = s32[] constant(3)\n  start", COUNT: "count = s32[] constant(0)", "direction=LT": "direction=GT"},
    ):  # fmt: skip
        before, after, report = golden.run(golden.read(EMBEDDING, edits), StrandPrefetch())
        assert report.outcome == CHANGED
        golden.assert_same_results(before, after)
