"""Strand duplication on small HLO modules: the modules that it makes, and the ones that it leaves alone."""

import pytest

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.hlo import WhileLoop
from dhelix.passes.strands.strand_duplication import PAIRINGS, StrandDuplication
from dhelix.tests.passes import golden
from dhelix.tests.quick import slow_after, slow_but

SCAN = "strand_duplication/scan_over_layers.hlo"
UNEQUAL = "strand_duplication/unequal_trip_counts.hlo"


@pytest.mark.parametrize("name", golden.files("strand_duplication"))
def test_golden(name: str) -> None:
    golden.check(name, StrandDuplication())


def test_the_report_counts_what_was_made() -> None:
    _, _, report = golden.run(golden.read(SCAN), StrandDuplication())
    (note,) = report.notes
    assert note.message == "two strands" and note.instruction == "loop"
    assert note.facts == {
        "microbatches": 3,
        "forward_instructions": 10,
        "backward_instructions": 4,
        "merged_loops": ["forward.1 + backward.1 x 2"],
        "crossing_values": 2,
        "crossing_bytes": 16 + 32,
    }


def test_loops_that_cannot_merge_are_named() -> None:
    _, _, report = golden.run(golden.read(UNEQUAL), StrandDuplication())
    backward, forward, strands = report.notes  # in the order in which they run
    assert "not merged: it has 2 iterations; the other strand's loops have 1" in forward.message
    assert "not merged: it has 1 iteration; the other strand's loops have 2" in backward.message
    assert str(forward.instruction).startswith("forward") and str(backward.instruction).startswith("backward")
    assert strands.facts["merged_loops"] == []


def test_without_merging() -> None:
    before, after, report = golden.run(golden.read(SCAN), StrandDuplication(merge_layers=False))
    assert "strand_layers" not in golden.printed(after) and len(report.notes) == 1
    golden.assert_same_results(before, after)


@pytest.mark.parametrize("microbatches", slow_but([2, 5], [2, 3, 4, 5]))
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_pairing_computes_the_same(pairing: str, microbatches: int) -> None:
    """Depending on their number, one micro-batch is left over without a partner."""
    text = golden.read(SCAN).replace("f32[3,4]", f"f32[{microbatches},4]")
    text = text.replace("microbatches = s32[] constant(3)", f"microbatches = s32[] constant({microbatches})")
    before, after, _ = golden.run(text, StrandDuplication(pairing=pairing))
    golden.assert_same_results(before, after)


@pytest.mark.parametrize(
    "pairing, loops",
    [
        ("forward-forward", {"forward": 0, "backward": 2, "strand_layers": 1}),
        ("backward-backward", {"forward": 2, "backward": 0, "strand_layers": 1}),
        ("same-direction", {"forward": 0, "backward": 0, "strand_layers": 2}),
    ],
)
def test_pairs_that_go_the_same_way(pairing: str, loops: dict[str, int]) -> None:
    """The strand loop's only iteration holds two of three micro-batches. The first micro-batch runs before."""
    _, after, report = golden.run(golden.read(SCAN), StrandDuplication(pairing=pairing))
    (strands,) = [i for i in after.entry.instructions if i.opcode == "while" and i.name.startswith("strands")]
    inside = [i.name for i in strands.called[0].instructions if i.opcode == "while"]
    assert {kind: sum(name.startswith(kind) for name in inside) for kind in loops} == loops
    assert WhileLoop(strands).trip_count == 1
    assert len(report.notes[0].facts["merged_loops"]) == loops["strand_layers"]


def test_an_unknown_pairing_is_an_error() -> None:
    with pytest.raises(DhelixError, match="pairing='backward-forward' is unknown; take one of forward-backward"):
        StrandDuplication(pairing="backward-forward")


def test_the_same_module_gives_the_same_bytes() -> None:
    before, after, _ = golden.run(golden.read(SCAN), StrandDuplication())
    again, _ = PassManager([StrandDuplication()]).run(Stage.LOWERED, before.to_bytes())
    assert again == after.to_bytes()


def test_what_is_interleaved_already_is_refused_as_that() -> None:
    _, after, _ = golden.run(golden.read(SCAN), StrandDuplication())
    with pytest.raises(PassRefusal, match="already has two strands"):
        PassManager([StrandDuplication()], strict=True).run(Stage.LOWERED, after.to_bytes())


def test_attributes_of_instructions_are_copied_along() -> None:
    """The forward pass is in the program twice: F(0) before the strand loop, and once in the loop."""
    multiply = 'op_name="jit(step)/jvp()/while/body/mul"}'
    edits = {multiply: multiply + ', frontend_attributes={_xla_compute_type="sparse"}'}
    _, after, _ = golden.run(golden.read(SCAN, edits), StrandDuplication())
    lines = [line for line in golden.printed(after).splitlines() if "_xla_compute_type" in line]
    assert len(lines) == 2 and all("jvp()/while/body/mul" in line for line in lines)


NEW_SUMS = "new_sums = f32[2,4] add(sums, grads)"
NEXT_SUMS = "tuple(next, total, new_sums, batches, w)"
UNUSUAL = {
    "two micro-batches": {"microbatches = s32[] constant(3)": "microbatches = s32[] constant(2)"},
    "the loop counts down": {
        "next = s32[] add(i, one)": "next = s32[] subtract(i, one)",
        "microbatches = s32[] constant(3)": "microbatches = s32[] constant(-1)",
        "compare(i, microbatches), direction=LT": "compare(i, microbatches), direction=GT",
        "zero = s32[] constant(0)\n  nothing = f32[] constant(0)\n  zeros = f32[2,4] broadcast(nothing), "
        "dimensions={}\n  start": "zero = s32[] constant(2)\n  nothing = f32[] constant(0)\n"
        "  zeros = f32[2,4] broadcast(nothing), dimensions={}\n  start",
    },
    "backward reads the running loss": {
        NEW_SUMS: "losses = f32[2,4] broadcast(loss), dimensions={}\n"
        "  weighted = f32[2,4] multiply(grads, losses)\n  new_sums = f32[2,4] add(sums, weighted)"
    },
    "backward reads the number of the micro-batch": {
        NEW_SUMS: "number = f32[] convert(i)\n  numbers = f32[2,4] broadcast(number), dimensions={}\n"
        "  weighted = f32[2,4] multiply(grads, numbers)\n  new_sums = f32[2,4] add(sums, weighted)"
    },
    "backward forgets the gradients before": {NEXT_SUMS: NEXT_SUMS.replace("new_sums", "grads")},
    "the forward layers read no micro-batch": {
        "dynamic-slice(batches, i, zero)": "dynamic-slice(batches, zero, zero)",
        "dy = f32[4] multiply(y, y)": "own = f32[1,4] dynamic-slice(batches, i, zero), dynamic_slice_sizes={1,4}\n"
        "  target = f32[4] reshape(own)\n  dy = f32[4] multiply(y, target)",
    },
    "the loss is not a result": {
        "ROOT result = (f32[], f32[2,4]) tuple(loss, sums)": "ROOT result = (f32[2,4]) tuple(sums)"
    },
    "the loss is read twice": {
        "ROOT result = (f32[], f32[2,4]) tuple(loss, sums)": "again = f32[] get-tuple-element(loop), index=1\n"
        "  ROOT result = (f32[], f32[2,4], f32[]) tuple(loss, sums, again)"
    },
    "the number of micro-batches is a result": {
        "ROOT result = (f32[], f32[2,4]) tuple(loss, sums)": "number = s32[] get-tuple-element(loop), index=0\n"
        "  ROOT result = (f32[], f32[2,4], s32[]) tuple(loss, sums, number)"
    },
}


@pytest.mark.parametrize("case", slow_after(3, UNUSUAL))
def test_results_are_the_same(case: str) -> None:
    text = golden.read(SCAN, UNUSUAL[case])
    before, after, _ = golden.run(text, StrandDuplication())
    assert after is not before
    golden.assert_same_results(before, after)


def test_layers_that_read_no_micro_batch_belong_to_no_strand() -> None:
    text = golden.read(SCAN, UNUSUAL["the forward layers read no micro-batch"])
    _, _, report = golden.run(text, StrandDuplication())
    assert report.notes[0].message.startswith("no layer loops merged: a loop over layers computes the same for every ")
    assert report.notes[1].facts["merged_loops"] == []


def test_counters_that_end_elsewhere_are_carried_apart() -> None:
    """Two trips from zero and two trips from one: equal trip counts, but different values, so two counters."""
    edits = {
        "tuple(zero, dy, zeros, residuals, w)": "tuple(one, dy, zeros, residuals, w)",
        "last = s32[] constant(2)": "last = s32[] constant(3)",
        "r = s32[] subtract(one, l)": "two = s32[] constant(2)\n  r = s32[] subtract(two, l)",
    }
    text = golden.read(SCAN, edits)
    before, after, report = golden.run(text, StrandDuplication())
    assert report.notes[0].facts["merged_loops"] == ["forward.1 + backward.1 x 2"]
    state = "(s32[], f32[4], f32[2,4], f32[2,4], s32[], f32[4], f32[2,4], f32[2,4])"
    assert f"= {state} while(" in golden.printed(after)
    golden.assert_same_results(before, after)


def test_without_a_backward_pass_the_step_is_told_so() -> None:
    text = golden.read(SCAN).replace("transpose(jvp())", "jvp()")
    with pytest.raises(PassRefusal, match="the step has no backward pass"):
        golden.run(text, StrandDuplication())
