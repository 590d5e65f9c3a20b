"""What chunks hand one another: the activations and cotangents that each tick makes.

A message leaves at the end of the tick that made it, for another stage or for another chunk of the same one. In a tick
no stage gets two activations or two cotangents (`validation.validate`), so what goes to other stages is a partial
permutation: one collective-permute of each kind. In the W schedule and in 1F1B a message is read in the very next tick;
in the others it may have to wait for some ticks.
"""

from __future__ import annotations

from typing import Literal

from dhelix.passes.pipeline_fold.schedule import Schedule

# From stage, to stage.
Hop = tuple[int, int]
Direction = Literal["forward", "backward"]


def transfers(schedule: Schedule, tick: int) -> tuple[list[Hop], list[Hop]]:
    """(activations, cotangents) that `tick` makes for other stages, ordered by sender.

    What the next chunk reads on the same stage is no transfer, nor is what the last chunk makes for the loss or the
    first one for the embedding.
    """
    activations = [hop for hop in handed_over(schedule, tick, "forward") if hop[0] != hop[1]]
    cotangents = [hop for hop in handed_over(schedule, tick, "backward") if hop[0] != hop[1]]
    return activations, cotangents


def handed_over(schedule: Schedule, tick: int, direction: Direction) -> list[Hop]:
    """`transfers` of one kind ("forward": activations, "backward": cotangents), and those from a stage to itself."""
    layout, hops = schedule.layout, []
    for stage, cell in enumerate(schedule.ticks[tick]):
        work = cell.forward if direction == "forward" else cell.backward
        reader = -1 if work is None else work.chunk + (1 if direction == "forward" else -1)
        if 0 <= reader < layout.chunks:
            hops.append((stage, layout.stage_of[reader]))
    return hops
