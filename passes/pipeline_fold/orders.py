"""From the order in which each stage works to ticks: every cell as early as its inputs and its stage allow.

The schedules of the literature are given as an order of work for each stage; when it happens follows from the messages:

    stage 0: F0 F1 B0 B1         tick      0    1    2    3    4    5
    stage 1: F0 B0 F1 B1   ->    stage 0   F0   F1        B0        B1
                                 stage 1        F0   B0   F1   B1

A cell takes one tick and needs what earlier ticks made. A stage takes one activation and one cotangent a tick, from
itself or another: of two cells that would hand it the same kind in one tick, the one on the earlier stage waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.schedule import Layout
from dhelix.passes.pipeline_fold.slots import Item

# What goes forward, what goes backward: the cell without its slots.
Pair = tuple[Item | None, Item | None]


def in_ticks(layout: Layout, orders: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """By tick, what each stage does, from what each does in order. Raises DhelixError where the orders deadlock."""
    position = [0] * layout.stages
    made: set[tuple[str, Item]] = set()
    timetable: list[list[Pair]] = []
    while any(position[stage] < len(order) for stage, order in enumerate(orders)):
        row: list[Pair] = [(None, None)] * layout.stages
        receivers: set[tuple[str, int]] = set()
        for stage, order in reversed([*enumerate(orders)]):
            pair = order[position[stage]] if position[stage] < len(order) else (None, None)
            sent = _sent(layout, pair)
            if pair != (None, None) and _reads(layout, pair) <= made and not sent & receivers:
                row[stage] = pair
                receivers |= sent
        if all(pair == (None, None) for pair in row):
            waiting = next(order[position[stage]] for stage, order in enumerate(orders) if position[stage] < len(order))
            raise DhelixError(f"the stages wait for one another in tick {len(timetable)}: {waiting} has no input")
        for stage, (forward, backward) in enumerate(row):
            position[stage] += (forward, backward) != (None, None)
            made |= {("forward", forward)} if forward is not None else set()
            made |= {("backward", backward)} if backward is not None else set()
        timetable.append(row)
    return timetable


def of_first(microbatches: int, orders: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """`orders` without the work of later micro-batches: what a schedule does that was made for more than there are."""

    def kept(item: Item | None) -> Item | None:
        return item if item is not None and item[0] < microbatches else None

    return [
        [pair for forward, backward in order if (pair := (kept(forward), kept(backward))) != (None, None)]
        for order in orders
    ]


def _reads(layout: Layout, pair: Pair) -> set[tuple[str, Item]]:
    """What has to be made before `pair` can start."""
    forward, backward = pair
    needs: set[tuple[str, Item]] = set()
    if forward is not None and forward[1] > 0:
        needs.add(("forward", (forward[0], forward[1] - 1)))
    if backward is not None:
        needs.add(("forward", backward))
        if backward[1] + 1 < layout.chunks:
            needs.add(("backward", (backward[0], backward[1] + 1)))
    return needs


def _sent(layout: Layout, pair: Pair) -> set[tuple[str, int]]:
    """Kind and receiver of what `pair` hands over."""
    sent = set()
    for kind, item, step in (("activation", pair[0], 1), ("cotangent", pair[1], -1)):
        reader = -1 if item is None else item[1] + step
        if 0 <= reader < layout.chunks:
            sent.add((kind, layout.stage_of[reader]))
    return sent
