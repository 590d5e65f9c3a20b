"""Separate slices of weights for each strand, on small HLO modules. Compiled steps are in test_structure.py."""

import pytest

from dhelix.passes.framework.report import CHANGED, UNCHANGED
from dhelix.passes.strands.slice_separation import SliceSeparation
from dhelix.tests.passes import golden

BOTH = "slice_separation/both_strands.hlo"


@pytest.mark.parametrize("name", golden.files("slice_separation"))
def test_golden(name: str) -> None:
    report = golden.check(name, SliceSeparation())
    assert [note.facts["arrays"] for note in report.notes] == [1]


LEFT_ALONE = {
    "one strand slices it": {'sizes={1,4}, metadata={op_name="strand_alpha/w"}': 'sizes={1,4}'},
    "the loop changes it": {"tuple(next, sum, written, w, v)": "tuple(next, sum, written, v, w)"},
    "it is another loop": {"strand_layers = (": "layers = (", "get-tuple-element(strand_layers), index=1":
                           "get-tuple-element(layers), index=1", "get-tuple-element(strand_layers), index=2":
                           "get-tuple-element(layers), index=2"},
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case: str) -> None:
    before, after, report = golden.run(golden.read(BOTH, LEFT_ALONE[case]), SliceSeparation())
    assert after is before and report.outcome == UNCHANGED, golden.printed(after)


def test_weights_that_are_constants() -> None:
    """XLA moves constants into loops and evaluates what it can, but it cannot evaluate a barrier."""
    edits = {"w = f32[2,4] parameter(2)": "w = f32[2,4] constant({{1,2,3,4},{5,6,7,8}})",
             "v = f32[2,4] parameter(3)": "v = f32[2,4] parameter(2)"}  # fmt: skip
    before, after, report = golden.run(golden.read(BOTH, edits), SliceSeparation())
    assert report.outcome == CHANGED
    golden.assert_same_results(before, after)


def test_an_array_that_the_loop_carries_twice_is_one_array() -> None:
    """XLA would carry the array once, and fuse the slices of both strands."""
    edits = {"tuple(zero, x, r, w, v)": "tuple(zero, x, r, w, w)",
             "dynamic-slice(again, back, zero)": "dynamic-slice(v, back, zero)",
             'metadata={op_name="strand_alpha/v"}': 'metadata={op_name="strand_alpha/w"}',
             "w_l = f32[1,4] dynamic-slice(w, l, zero)": "w_l = f32[1,4] dynamic-slice(again, l, zero)"}  # fmt: skip
    before, after, report = golden.run(golden.read(BOTH, edits), SliceSeparation())
    assert [note.facts["arrays"] for note in report.notes] == [1]
    golden.assert_same_results(before, after)


def test_tables_that_both_read_whole_are_read_by_each_by_itself() -> None:
    """Examples are the angles of rotary embeddings. Otherwise XLA would make one kernel of both strands' layers."""
    edits = {"v_b = f32[1,4] dynamic-slice(v, back, zero), dynamic_slice_sizes={1,4}": "v_b = f32[2,4] negate(v)",
             "other_slot = f32[1,4] multiply(w_b, v_b)": "v_s = f32[1,4] slice(v_b), slice={[0:1], [0:4]}\n"
             '  v_f = f32[2,4] exponential(v), metadata={op_name="strand_beta/v"}\n'
             "  v_t = f32[1,4] slice(v_f), slice={[1:2], [0:4]}\n  v_u = f32[1,4] add(v_s, v_t)\n"
             "  other_slot = f32[1,4] multiply(w_b, v_u)"}  # fmt: skip
    before, after, report = golden.run(golden.read(BOTH, edits), SliceSeparation())
    assert [note.facts["arrays"] for note in report.notes] == [2]
    golden.assert_same_results(before, after)
