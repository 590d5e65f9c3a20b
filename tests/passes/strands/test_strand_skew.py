"""Strands that are some layers apart: loops and residuals of the whole step, and unsupported cases."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.analysis.names import STRANDS, merged_loops
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import REFUSED, StageReport
from dhelix.passes.hlo import HloModule, Instruction, WhileLoop, shapes
from dhelix.passes.strands.strand_skew import StrandSkew
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo
from dhelix.runtime.step.pass_lists import strand_passes
from dhelix.tests.passes.program_losses import ROWS, WIDTH
from dhelix.tests.passes.programs import Program, build
from dhelix.tests.passes.strands.test_generated_programs import interpret
from dhelix.tests.quick import slow_but


def skewed(program: Program, layers: int) -> tuple[HloModule, StageReport]:
    """The step with strands that are `layers` layers apart. Checks that it computes the same bits as before."""
    step, arguments = build(program)
    lowered = jax.jit(step, keep_unused=True).lower(*arguments)
    changed, report = PassManager(strand_passes(layers)).run(Stage.LOWERED, hlo_bytes(lowered))
    assert changed is not None
    both = interpret(lowered, arguments), interpret(with_hlo(lowered, changed), arguments)
    assert all(np.array_equal(x, y) for x, y in zip(*both, strict=True))
    return HloModule.from_bytes(changed), report


def trips(loop: Instruction) -> int:
    count = WhileLoop(loop).trip_count
    assert count is not None
    return count


def loops(module: HloModule) -> list[Instruction]:
    return [i for i in module.entry.instructions if i.opcode == "while"]


@pytest.mark.parametrize("microbatches", slow_but([3, 6, 7], [3, 4, 5, 6, 7]))
@pytest.mark.parametrize(("layers", "apart"), [(2, 1), (4, 1), (5, 2), pytest.param(7, 3, marks=pytest.mark.slow)])
def test_both_ends_run_beside_another_micro_batch(microbatches: int, layers: int, apart: int) -> None:
    module, report = skewed(Program(microbatches=microbatches, depth=layers), apart)
    said = next(note for entry in report.passes for note in entry.notes if note.message == "two strands")
    assert said.facts["microbatches"] == microbatches
    found = loops(module)
    strands = next(loop for loop in found if loop.name.startswith(STRANDS))
    inside = [trips(loop) for loop in merged_loops(strands.called[0])]
    assert trips(strands) == microbatches - 2 and sorted(inside) == sorted([layers - apart, apart])
    ends = [trips(loop) for loop in merged_loops(module.entry)]
    assert sorted(ends) == sorted([apart, layers - apart, apart])
    alone = sum(trips(loop) for loop in found if loop is not strands) - sum(ends)
    assert alone == 2 * (layers - apart)  # 2L without skew


def test_residuals_of_so_many_more_layers_are_alive() -> None:
    layers, apart, microbatches = 5, 2, 7  # no other stacks have these lengths
    module, _ = skewed(Program(microbatches=microbatches, depth=layers), apart)
    (strands,) = (loop for loop in loops(module) if loop.name.startswith(STRANDS))
    stacks = [list(s.dimensions) for s in strands.shape.tuple_shapes if list(s.dimensions[1:]) == [ROWS, WIDTH]]
    kinds = stacks.count([layers - apart, ROWS, WIDTH])
    others = stacks.count([microbatches, ROWS, WIDTH])  # inputs
    assert kinds and stacks.count([2 * apart, ROWS, WIDTH]) == kinds == (len(stacks) - others) / 2


def test_the_last_forward_pass_stores_where_the_last_but_one_backward_pass_has_read() -> None:
    module, report = skewed(Program(microbatches=4, depth=5), 2)
    shared = [note for entry in report.passes for note in entry.notes if "share one buffer" in note.message]
    assert len(shared) == 3  # twice in the strand loop, once after it
    assert len({note.facts["stacks"] for note in shared}) == 1
    both_ways = [loop for loop in merged_loops(module.entry) if trips(loop) == 3]
    sizes = [shapes.text(s) for s in both_ways[0].shape.tuple_shapes]
    assert sizes.count(f"f32[3,{ROWS},{WIDTH}]") == shared[0].facts["stacks"]


def test_gradients_that_wait_for_each_other_stay_apart() -> None:
    """A running average of all gradients is not a sum of slots."""
    _, report = skewed(Program(microbatches=4, depth=4, carries=("average",)), 1)
    assert any("not merged: they depend on each other" in n.message for e in report.passes for n in e.notes)


@pytest.mark.parametrize(
    ("program", "apart", "said"),
    [
        (Program(microbatches=2, depth=4), 1, "strands of 2 micro-batches cannot be skewed; that takes at least 3"),
        (Program(microbatches=3, depth=4), 3, "strands of 4 layers can be at most 2 layers apart, not 3"),
        (Program(microbatches=3, depth=4, stack="unrolled"), 1, "takes one loop over layers in each pass"),
        (Program(microbatches=3, depth=4, stack="encoder_decoder"), 1, "there are 2"),
        (Program(microbatches=3, depth=4, steps="called"), 1, "several loops over micro-batches"),
    ],
)
def test_where_it_cannot_be_strands_run_as_without(program: Program, apart: int, said: str) -> None:
    _, report = skewed(program, apart)
    first, second = report.passes[:2]
    assert first.outcome == REFUSED and said in first.notes[-1].message
    assert second.name == "strand-duplication" and second.notes


def test_no_layers_apart_is_no_skew() -> None:
    with pytest.raises(DhelixError, match="0 layers apart"):
        StrandSkew(0)
