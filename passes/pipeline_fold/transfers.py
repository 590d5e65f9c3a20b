"""Messages between chunks: the activations and cotangents that each tick produces.

A message leaves at the end of the tick that produced it. It goes to another stage, or to another chunk on the same
stage. No stage gets two activations or two cotangents in a tick (`validation.validate`). So the messages of one kind
between stages form a partial permutation, and one collective-permute sends them. In lockstep schedules and in 1F1B, a
message is read in the very next tick. In other schedules, a message may wait for some ticks.
"""

from __future__ import annotations

from typing import Literal

from dhelix.passes.pipeline_fold.schedule import Schedule

# (from stage, to stage)
Hop = tuple[int, int]
Direction = Literal["forward", "backward"]


def transfers(schedule: Schedule, tick: int) -> tuple[list[Hop], list[Hop]]:
    """The hops of the activations and of the cotangents that `tick` sends to other stages, ordered by sender.

    A hop is a pair (from stage, to stage). Three kinds of results have no hop: the input of a next chunk on the same
    stage, the output of the last chunk (for the loss), and the cotangent of the first chunk (for the embedding).
    """
    activations = [hop for hop in handed_over(schedule, tick, "forward") if hop[0] != hop[1]]
    cotangents = [hop for hop in handed_over(schedule, tick, "backward") if hop[0] != hop[1]]
    return activations, cotangents


def handed_over(schedule: Schedule, tick: int, direction: Direction) -> list[Hop]:
    """The (from stage, to stage) of each message of `tick` in one direction, also from a stage to itself.

    Forward messages are activations. Backward messages are cotangents.
    """
    layout, hops = schedule.layout, []
    for stage, cell in enumerate(schedule.ticks[tick]):
        work = cell.forward if direction == "forward" else cell.backward
        reader = -1 if work is None else work.chunk + (1 if direction == "forward" else -1)
        if 0 <= reader < layout.chunks:
            hops.append((stage, layout.stage_of[reader]))
    return hops
