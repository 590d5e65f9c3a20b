"""Slices of weights by each strand, on small HLO modules; compiled steps in test_structure.py."""

import pytest

from dhelix.passes.report import CHANGED, UNCHANGED
from dhelix.passes.slice_separation import SliceSeparation
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
    """XLA moves constants into loops and evaluates what it can; it cannot evaluate a barrier."""
    edits = {"w = f32[2,4] parameter(2)": "w = f32[2,4] constant({{1,2,3,4},{5,6,7,8}})",
             "v = f32[2,4] parameter(3)": "v = f32[2,4] parameter(2)"}  # fmt: skip
    before, after, report = golden.run(golden.read(BOTH, edits), SliceSeparation())
    assert report.outcome == CHANGED
    golden.assert_same_results(before, after)
