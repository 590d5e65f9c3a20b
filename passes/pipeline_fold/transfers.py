"""Messages between chunks: the activations and cotangents that each tick produces.

A message leaves at the end of the tick that produced it, for another stage or for another chunk of the same stage. No
stage gets two activations or two cotangents in a tick (`validation.validate`). So the messages between stages form a
partial permutation: one collective-permute of each kind. In the W schedule and in 1F1B a message is read in the very
next tick. In the other schedules it may wait for some ticks.
"""

from __future__ import annotations

from typing import Literal

from dhelix.passes.pipeline_fold.schedule import Schedule

# (from stage, to stage)
Hop = tuple[int, int]
Direction = Literal["forward", "backward"]


def transfers(schedule: Schedule, tick: int) -> tuple[list[Hop], list[Hop]]:
    """(activations, cotangents) that `tick` sends to other stages, ordered by sender.

    Three results are no transfers: input of the next chunk on the same stage, output of the last chunk for the loss,
    and cotangent of the first chunk for the embedding.
    """
    activations = [hop for hop in handed_over(schedule, tick, "forward") if hop[0] != hop[1]]
    cotangents = [hop for hop in handed_over(schedule, tick, "backward") if hop[0] != hop[1]]
    return activations, cotangents


def handed_over(schedule: Schedule, tick: int, direction: Direction) -> list[Hop]:
    """`transfers` in one direction ("forward": activations, "backward": cotangents), plus hops from a stage to
    itself."""
    layout, hops = schedule.layout, []
    for stage, cell in enumerate(schedule.ticks[tick]):
        work = cell.forward if direction == "forward" else cell.backward
        reader = -1 if work is None else work.chunk + (1 if direction == "forward" else -1)
        if 0 <= reader < layout.chunks:
            hops.append((stage, layout.stage_of[reader]))
    return hops
