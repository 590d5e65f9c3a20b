"""Activation sharing on small HLO modules: one stack of residuals for both strands, or the reason for two."""

import pytest

from dhelix.passes.framework.report import CHANGED, UNCHANGED
from dhelix.passes.strands.activation_sharing import ActivationSharing
from dhelix.tests.passes import golden

ONE_BUFFER = "activation_sharing/one_buffer.hlo"


@pytest.mark.parametrize("name", golden.files("activation_sharing"))
def test_golden(name: str) -> None:
    report = golden.check(name, ActivationSharing())
    assert report.notes[0].facts == {"stacks": 1, "bytes_freed": 32}


def test_an_even_number_of_micro_batches_ends_in_mirrored_slots() -> None:
    golden.check(
        ONE_BUFFER,
        ActivationSharing(),
        edits={"microbatches = s32[] constant(3)": "microbatches = s32[] constant(4)"},
        prefix="EVEN",
    )


@pytest.mark.parametrize("layers, microbatches", [(1, 5), (3, 2), (4, 3)])
def test_results_are_the_same_for_any_number_of_layers_and_micro_batches(layers: int, microbatches: int) -> None:
    text = golden.read(ONE_BUFFER).replace("[3,4]", f"[{microbatches}, 4]").replace("[2,4]", f"[{layers},4]")
    text = text.replace("layers = s32[] constant(2)", f"layers = s32[] constant({layers})")
    text = text.replace("microbatches = s32[] constant(3)", f"microbatches = s32[] constant({microbatches})")
    text = text.replace("subtract(one, l)", "subtract(top, l)")
    text = text.replace("  r = s32", f"  top = s32[] constant({layers - 1})\n  r = s32")
    before, after, report = golden.run(text, ActivationSharing())
    assert report.outcome == CHANGED
    golden.assert_same_results(before, after)


DW = 'dw = f32[4] multiply(dy, old_x), metadata={op_name="strand_alpha/dw"}'
SQUARE = "square = f32[4,4] broadcast(dy), dimensions={0}\n"
DOT = "f32[4] dot({}, square), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}"

# Readers of the residual -> whether the barrier takes the residual itself, which is then copied first.
READERS = {
    "a product of what is made of it": ("h = f32[4] multiply(dy, old_x)\n" + "dw = " + DOT.format("h"), False),
    "two, and one waits for the other's product": (
        "h = f32[4] multiply(dy, old_x)\n" + f"p = {DOT.format('h')}\n"
        "g = f32[4] multiply(p, old_x)\n" + "dw = " + DOT.format("g"), True),
    "a product": ("dw = " + DOT.format("old_x"), True),
    "more than products": ("h = f32[4] multiply(dy, old_x)\n" + f"p = {DOT.format('h')}\n" + "dw = f32[4] reverse(h), "
                           "dimensions={0}", True),
}  # fmt: skip


@pytest.mark.parametrize("case", READERS)
def test_residuals_that_products_read_behind_elementwise_operations_are_read_in_place(case: str) -> None:
    readers, is_copied = READERS[case]
    before, after, report = golden.run(golden.read(ONE_BUFFER, {DW: SQUARE + readers}), ActivationSharing())
    assert report.outcome == CHANGED
    golden.assert_same_results(before, after)
    (barrier,) = (i for c in after.computations for i in c.instructions if i.opcode == "opt-barrier")
    guarded = barrier.operands[0].operands[0]
    while guarded.opcode == "reshape":
        guarded = guarded.operands[0]
    assert (guarded.opcode == "dynamic-slice") == is_copied


READ = "old_slot = f32[1,4] dynamic-slice(old_stack, r, zero), dynamic_slice_sizes={1,4}"
WRITE = 'saved = f32[2,4] dynamic-update-slice(new_stack, x_slot, l, zero), metadata={op_name="strand_beta/save"}'
BODY_ROOT = "tuple(next, y, saved, w, dx, more_sums, old_stack)"
MORE_SUMS = "more_sums = f32[4] add(sums, dw)\n  w_slot_r"
SUMS_AFTER_LAYERS = "more_sums = f32[4] get-tuple-element(strand_layers.1), index=5"
LAST_READ = "slot = f32[1,4] dynamic-slice(stack, r, zero), dynamic_slice_sizes={1,4}"


def _add_first_slot_of(stack: str, name: str, total: str) -> str:
    """Adds slot 0 of `stack` to the value that `total` makes."""
    made = total.replace(f"{name} =", f"part_of_{name} =")
    return (
        f"{made}\n  first_slot = f32[1,4] slice({stack}), slice={{[0:1], [0:4]}}\n"
        f"  first = f32[4] reshape(first_slot)\n  {name} = f32[4] add(part_of_{name}, first)"
    )


ALL_SUMS = "all_sums = f32[4] get-tuple-element(backward), index=2"

# Change of the module -> why its stacks stay two, and the instruction that the reason names.
NOT_SHARED = {
    "the stack is read as a whole": (
        {"dw = f32[4] multiply(dy, old_x), metadata={op_name=\"strand_alpha/dw\"}":
         "all = f32[4] reduce(old_stack, nothing), dimensions={0}, to_apply=sum\n"
         "dw = f32[4] multiply(dy, all)",
         READ: READ + "\n  nothing = f32[] constant(0)",
         "HloModule step\n": "HloModule step\nsum {\n a = f32[] parameter(0)\n b = f32[] parameter(1)\n"
                             " ROOT c = f32[] add(a, b)\n}\n"},
        "the backward pass does not read one slot at a time", "all",
    ),
    "a part of a slot is read": (
        {READ: "half = f32[1,2] dynamic-slice(old_stack, r, zero), dynamic_slice_sizes={1,2}\n"
               "  old_slot = f32[1,4] concatenate(half, half), dimensions={1}"},
        "the backward pass does not read one slot at a time", "half",
    ),
    "slots are read in the order of forward": (
        {READ: READ.replace("r, zero", "l, zero")},
        "the backward pass does not read the slots in reverse order", "saved",
    ),
    "two slots are read": (
        {READ: "upper = f32[1,4] dynamic-slice(old_stack, l, zero), dynamic_slice_sizes={1,4}\n"
               "  lower = f32[1,4] dynamic-slice(old_stack, r, zero), dynamic_slice_sizes={1,4}\n"
               "  old_slot = f32[1,4] subtract(upper, lower)"},
        "the slots do not follow from the layer counter", "saved",
    ),
    "the slot depends on data": (
        {READ: "number_1 = f32[1] slice(dy), slice={[0:1]}\n  number_0 = f32[] reshape(number_1)\n"
               "  number = s32[] convert(number_0)\n  " + READ.replace("r, zero", "number, zero")},
        "the slots do not follow from the layer counter", "saved",
    ),
    "a slot is never written": (
        {WRITE: WRITE.replace("l, zero", "zero, zero")},
        "the backward pass does not read the slots in reverse order", "saved",
    ),
    "half a slot is written": (
        {WRITE: "half = f32[1,2] slice(x_slot), slice={[0:1], [0:2]}\n  " + WRITE.replace("x_slot", "half")},
        "the forward pass does not write one slot at a time", "saved",
    ),
    "the stack is not written slot by slot": (
        {WRITE: "slots = f32[2,4] broadcast(x), dimensions={1}\n  saved = f32[2,4] add(new_stack, slots)"},
        "the forward pass does not write the stack slot by slot", "saved",
    ),
    "forward reads what it has written": (
        {WRITE: WRITE + "\n  written = f32[1,4] dynamic-slice(saved, l, zero), dynamic_slice_sizes={1,4}\n"
                "  one_more = f32[4] reshape(written)",
         BODY_ROOT: "tuple(next, one_more, saved, w, dx, more_sums, old_stack)"},
        "the forward pass reads the stack", "saved",
    ),
    "backward changes the old stack": (
        {BODY_ROOT: BODY_ROOT.replace("old_stack", "new_stack")},
        "the backward pass changes the stack", "new_stack",
    ),
    "it is read outside the layer loop": (
        {SUMS_AFTER_LAYERS: _add_first_slot_of("old_stack", "more_sums", SUMS_AFTER_LAYERS)},
        "the stack is read outside the layer loop", "first_slot",
    ),
    "it is read after the layer loop": (
        {SUMS_AFTER_LAYERS: "untouched = f32[2,4] get-tuple-element(strand_layers.1), index=6\n  "
                            + _add_first_slot_of("untouched", "more_sums", SUMS_AFTER_LAYERS)},
        "the stack is read outside the layer loop", "first_slot",
    ),
    "the last backward pass reads other slots": (
        {LAST_READ: LAST_READ.replace("r, zero", "l, zero")},
        "the last backward pass reads the slots in another order than the earlier ones", "backward",
    ),
    "the last backward pass reads it outside its loop": (
        {ALL_SUMS: _add_first_slot_of("last_stack", "all_sums", ALL_SUMS)},
        "the last backward pass reads the stack outside its layer loop", "strands",
    ),
    "it is read after the last backward pass": (
        {ALL_SUMS: "untouched = f32[2,4] get-tuple-element(backward), index=3\n  "
                   + _add_first_slot_of("untouched", "all_sums", ALL_SUMS)},
        "the stack is read after the last backward pass", "untouched",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_SHARED)
def test_not_shared(case: str) -> None:
    edits, reason, instruction = NOT_SHARED[case]
    before, after, report = golden.run(golden.read(ONE_BUFFER, edits), ActivationSharing())
    assert after is before and report.outcome == UNCHANGED
    (note,) = report.notes
    assert note.message == f"residual stack not shared: {reason}"
    assert note.instruction and note.instruction.split(".")[0] == instruction


def test_a_stack_that_enters_the_layer_loop_twice_is_not_shared() -> None:
    """The second copy is read at other slots than the first copy is stored in."""
    state = "(s32[], f32[4], f32[2,4], f32[2,4], f32[4], f32[4], f32[2,4])"
    text = golden.read(
        ONE_BUFFER,
        {
            READ: "twin = f32[2,4] get-tuple-element(state), index=7\n  " + READ.replace("old_stack", "twin"),
            BODY_ROOT: BODY_ROOT[:-1] + ", twin)",
            "dy, sums, old_stack)": "dy, sums, old_stack, old_stack)",
        },
    ).replace(state, state[:-1] + ", f32[2,4])")
    before, after, report = golden.run(text, ActivationSharing())
    assert after is before and "enters the layer loop twice" in report.notes[0].message
