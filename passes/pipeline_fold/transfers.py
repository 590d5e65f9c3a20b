"""What stages send one another: the activations and cotangents that each tick of a schedule makes.

A message leaves at the end of the tick that made it. In one tick no stage sends or receives two activations, or two
cotangents (`validation.validate`), so each list is a partial permutation: one collective-permute.
"""

from __future__ import annotations

from collections.abc import Iterable

from dhelix.passes.pipeline_fold.schedule import Layout, Schedule, Work

# From stage, to stage.
Hop = tuple[int, int]


def transfers(schedule: Schedule, tick: int) -> tuple[list[Hop], list[Hop]]:
    """(activations, cotangents) that `tick` makes for other stages, ordered by sender.

    What the next chunk reads on the same stage is no transfer, nor is what the last chunk makes for the loss or the
    first one for the embedding.
    """
    cells = schedule.ticks[tick]
    activations = _hops(schedule.layout, (cell.forward for cell in cells), 1)
    cotangents = _hops(schedule.layout, (cell.backward for cell in cells), -1)
    return activations, cotangents


def _hops(layout: Layout, works: Iterable[Work | None], step: int) -> list[Hop]:
    hops = []
    for stage, work in enumerate(works):
        reader = -1 if work is None else work.chunk + step
        if 0 <= reader < layout.chunks and layout.stage_of[reader] != stage:
            hops.append((stage, layout.stage_of[reader]))
    return hops
