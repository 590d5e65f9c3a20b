"""The bidirectional pipeline: two strands from opposite ends, each with its own copy of the parameters.

The executor does not run this pipeline; only its cost is computed. With P stages, even micro-batches enter at stage 0
(first strand), and odd micro-batches enter at stage P - 1 (second strand). The backward of one strand and the forward
of the other strand cross the stages in the same direction. So a stage co-executes the two, as in the W schedule. But
stage d holds the layers of two linear layouts: parts d and P - 1 - d of the model.

    P = 2, M = 6  tick   0    1    2    3    4    5    6    7
    stage 0, forward     F0   F1   F2   F3   F4   F5              F0, F2, F4 and B0, B2, B4: first half of the layers
             backward              B1   B0   B3   B2   B5   B4    F1, F3, F5 and B1, B3, B5: second half
    stage 1, forward     F1   F0   F3   F2   F5   F4
             backward              B0   B1   B2   B3   B4   B5

A micro-batch passes the stages in the order of its strand; i counts these stages from 0, and k counts the micro-batches
of a strand from 0. On its stage i, micro-batch k runs forward in tick 2k + i and backward in tick 2k + 2P - 1 - i. If P
is odd, the second strand is one tick late, so that no stage has two forwards or two backwards in a tick.

According to DHelix section 6.5 and figure 6b (arXiv 2411.15871), this pipeline fits only the smallest models into
memory.
"""

from __future__ import annotations

from fractions import Fraction

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.layouts import linear_layout
from dhelix.passes.pipeline_fold.slots import Item
from dhelix.passes.pipeline_fold.tasks import PipelineCosts, StagePrograms, task


def bidirectional(layers: int, stages: int, microbatches: int, costs: PipelineCosts) -> StagePrograms:
    """The tasks of each stage; `evaluation.evaluate_programs` computes their cost.

    Raises:
      DhelixError: there are more stages than layers, or there is no stage or no micro-batch.
    """
    lengths = linear_layout(layers, stages).chunk_layers
    if microbatches < 1:
        raise DhelixError(f"{microbatches} micro-batches: a step needs at least one")
    forwards, backwards = dict[tuple[int, int], Item](), dict[tuple[int, int], Item]()
    for microbatch in range(microbatches):
        upward = microbatch % 2
        start = 2 * (microbatch // 2) + (stages % 2) * upward
        for chunk in range(stages):
            stage = stages - 1 - chunk if upward else chunk
            forwards[stage, start + chunk] = (microbatch, chunk)
            backwards[stage, start + 2 * stages - 1 - chunk] = (microbatch, chunk)
    ticks = range(microbatches + 2 * stages + 1)
    return StagePrograms(
        "bidirectional",
        lengths,
        tuple(lengths[stage] + lengths[stages - 1 - stage] for stage in range(stages)),
        tuple(
            tuple(
                task(lengths, forwards.get((stage, tick)), backwards.get((stage, tick)), costs, hands_over=True)
                for tick in ticks
                if (stage, tick) in forwards or (stage, tick) in backwards
            )
            for stage in range(stages)
        ),
        costs.of_ends(microbatches) / stages if costs.shared_ends else Fraction(0),
    )
