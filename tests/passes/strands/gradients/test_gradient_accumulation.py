"""Gradient accumulation inside the layer loop, on small HLO modules."""

import pytest

from dhelix.passes.framework.report import CHANGED, UNCHANGED
from dhelix.passes.strands.gradients.gradient_accumulation import GradientAccumulation
from dhelix.tests.passes import golden

LAYERS = "gradient_accumulation/layer_by_layer.hlo"


@pytest.mark.parametrize("name", golden.files("gradient_accumulation"))
def test_golden(name: str) -> None:
    golden.check(name, GradientAccumulation())


STACKED = 'stacked = bf16[2,4] dynamic-update-slice(stack, dw_slot, r, zero), metadata={op_name="strand_alpha/stack"}'
TOTAL = 'total = f32[2,4] add(accumulator, wide), metadata={op_name="strand_alpha/add"}'
WIDE = 'wide = f32[2,4] convert(grads), metadata={op_name="strand_alpha/convert"}'
ROOT = "ROOT result = (bf16[4], f32[2,4]) tuple(dx, total)"

LEFT_ALONE = {
    "the stack is used twice": {ROOT: "square = f32[2,4] multiply(wide, wide)\n"
                                "sum = f32[2,4] add(total, square)\n"
                                "ROOT result = (bf16[4], f32[2,4]) tuple(dx, sum)"},
    "the stack is a result": {ROOT: "ROOT result = (bf16[4], f32[2,4], bf16[2,4]) tuple(dx, total, grads)"},
    "the accumulator depends on the loop": {
        TOTAL: "wide_dx = f32[4] convert(dx)\n"
               "moved = f32[2,4] broadcast(wide_dx), dimensions={1}\n"
               "later = f32[2,4] add(accumulator, moved)\n"
               "total = f32[2,4] add(later, wide)"},
    "not an addition": {TOTAL: "total = f32[2,4] subtract(accumulator, wide)"},
    "added to itself": {TOTAL: "total = f32[2,4] add(wide, wide)"},
    "a slot is never written": {
        STACKED: STACKED.replace("r, zero", "zero, zero")},
    "one part of each slot is written": {
        "dw_slot = bf16[1,4] reshape(dw), metadata={op_name=\"strand_alpha/dw_slot\"}":
            "dw_slot = bf16[1,2] slice(w_slot), slice={[0:1], [0:2]}"},
    "a slot is read inside": {
        STACKED: "old = bf16[1,4] dynamic-slice(stack, r, zero), dynamic_slice_sizes={1,4}\n"
                 "summed = bf16[1,4] add(old, dw_slot)\n" + STACKED.replace("dw_slot", "summed")},
    "the slot depends on data": {
        STACKED: "first = bf16[1] slice(dy), slice={[0:1]}\n"
                 "scalar = bf16[] reshape(first)\n"
                 "number = s32[] convert(scalar)\n" + STACKED.replace("r, zero", "number, zero")},
    "it is the other strand": {STACKED: STACKED.replace("alpha", "beta")},
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case: str) -> None:
    before, after, report = golden.run(golden.read(LAYERS, LEFT_ALONE[case]), GradientAccumulation())
    assert after is before and report.outcome == UNCHANGED, golden.printed(after)


ALSO = {
    "without a convert, and the other way round": {
        WIDE: "same = bf16[2,4] copy(accumulator)",
        TOTAL: "total = bf16[2,4] add(grads, accumulator)",
        ROOT: "ROOT result = (bf16[4], bf16[2,4]) tuple(dx, total)",
        "accumulator = f32[2,4] parameter(2)": "accumulator = bf16[2,4] parameter(2)",
    },
    "whatever the stack starts as": {"nothing = bf16[] constant(0)": "nothing = bf16[] constant(1)"},
    "a weight, a choice, and decay in between": {
        TOTAL: "first = f32[1,1] slice(accumulator), slice={[0:1], [0:1]}\n"
               "weight = f32[] reshape(first)\n"
               "weights = f32[2,4] broadcast(weight), dimensions={}\n"
               "weighted = f32[2,4] multiply(wide, weights)\n"
               "none = f32[] constant(0)\n"
               "nones = f32[2,4] broadcast(none), dimensions={}\n"
               "counts = pred[] compare(weight, none), direction=NE\n"
               "chosen = pred[2,4] broadcast(counts), dimensions={}\n"
               "left = f32[2,4] select(chosen, weighted, nones)\n"
               "decay = f32[2,4] multiply(accumulator, accumulator)\n"
               "decayed = f32[2,4] subtract(left, decay)\n" + TOTAL.replace("wide", "decayed")
    },
    "in another shape": {
        TOTAL: "one = f32[1,2,4] reshape(wide)\n"
               "other = f32[1,2,4] reshape(accumulator)\n"
               "sum = f32[1,2,4] add(other, one)\n"
               "total = f32[2,4] reshape(sum)"
    },
    "the accumulator is read elsewhere too": {
        ROOT: "before = f32[2,4] negate(accumulator)\n"
              "ROOT result = (bf16[4], f32[2,4], f32[2,4]) tuple(dx, total, before)"
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ALSO)
def test_accumulates_inside(case: str) -> None:
    before, after, report = golden.run(golden.read(LAYERS, ALSO[case]), GradientAccumulation())
    assert report.outcome == CHANGED and "[2,4] add(" not in golden.printed(after)
    assert report.notes[0].facts == {"stacks": 1, "bytes_freed": 16}
    golden.assert_same_results(before, after)


def test_two_stacks_of_one_loop() -> None:
    """For example weights and biases; each stack has its own accumulator."""
    state = "(s32[], bf16[4], bf16[2,4], bf16[2,4])"
    text = golden.read(
        LAYERS,
        {
            STACKED: STACKED
            + "\nbiases = bf16[2,4] get-tuple-element(state), index=4\n"
            + STACKED.replace("stacked", "stacked_biases").replace("stack,", "biases,"),
            "tuple(next, dx, stacked, w)": "tuple(next, dx, stacked, w, stacked_biases)",
            "tuple(zero, dy, zeros, w)": "tuple(zero, dy, zeros, w, zeros)",
            TOTAL: TOTAL + "\nbiases = bf16[2,4] get-tuple-element(loop), index=4\n"
            "negated = f32[2,4] negate(accumulator)\n"
            + WIDE.replace("wide", "wide_biases").replace("grads", "biases")
            + "\n"
            + TOTAL.replace("total", "total_biases").replace("accumulator, wide", "negated, wide_biases"),
            ROOT: "ROOT result = (bf16[4], f32[2,4], f32[2,4]) tuple(dx, total, total_biases)",
        },
    ).replace(state, state[:-1] + ", bf16[2,4])")
    before, after, report = golden.run(text, GradientAccumulation())
    assert report.notes[0].facts == {"stacks": 2, "bytes_freed": 32}
    assert "(s32[], bf16[4], bf16[2,4], f32[2,4], f32[2,4]) while(" in golden.printed(after)
    golden.assert_same_results(before, after)
