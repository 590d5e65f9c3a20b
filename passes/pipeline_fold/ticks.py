"""From the order in which each stage works to ticks: every cell as early as its inputs and its stage allow.

The schedules of the literature are given as an order of work for each stage; when it happens follows from the messages:

    stage 0: F0 F1 B0 B1         tick      0    1    2    3    4    5
    stage 1: F0 B0 F1 B1   ->    stage 0   F0   F1        B0        B1
                                 stage 1        F0   B0   F1   B1

A cell takes one tick and needs what earlier ticks made. A stage takes one activation and one cotangent a tick, from
itself or another: of two cells that would hand it the same kind in one tick, the one on the earlier stage waits.

Ticks are of equal length on paper alone. Where neighbours meet at the end of each, a forward beside a backward waits.
`one_way` keeps them apart, after a tick forward one backward, as far as there is work for it:

    stage 0: F0 F1 F2 B0 F3 B1      tick      0    1    2    3    4    5    6
    stage 1: F0 B0 F1 B1 F2 B2      stage 0   F0   F1        F2   B0   F3   B1
                                    stage 1        F0   B0   F1   B1   F2   B2
"""

from __future__ import annotations

from collections.abc import Sequence

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.schedule import Layout
from dhelix.passes.pipeline_fold.slots import Item

# What goes forward, what goes backward: the cell without its slots.
Pair = tuple[Item | None, Item | None]
_IDLE: Pair = (None, None)


def in_ticks(layout: Layout, orders: Sequence[Sequence[Pair]], *, one_way: bool = False) -> list[list[Pair]]:
    """By tick, what each stage does, from what each does in order. Raises DhelixError where the orders deadlock.

    Args:
      one_way: whether all stages go the same way in a tick, forward and backward by turns; no cell does both.
    """
    position = [0] * layout.stages
    made: set[tuple[str, Item]] = set()
    timetable: list[list[Pair]] = []
    while any(position[stage] < len(order) for stage, order in enumerate(orders)):
        pairs = [order[at] if at < len(order) else _IDLE for order, at in zip(orders, position, strict=True)]
        row = _row(layout, pairs, made)
        if one_way:
            was_forward = not timetable or any(forward is not None for forward, _ in timetable[-1])
            forward = [pair if pair[1] is None else _IDLE for pair in pairs]
            backward = [pair if pair[0] is None else _IDLE for pair in pairs]
            rows = [_row(layout, each, made) for each in ((backward, forward) if was_forward else (forward, backward))]
            row = next((row for row in rows if set(row) != {_IDLE}), row)
        if all(pair == _IDLE for pair in row):
            waiting = next(order[position[stage]] for stage, order in enumerate(orders) if position[stage] < len(order))
            raise DhelixError(f"the stages wait for one another in tick {len(timetable)}: {waiting} has no input")
        for stage, (forward, backward) in enumerate(row):
            position[stage] += (forward, backward) != _IDLE
            made |= {("forward", forward)} if forward is not None else set()
            made |= {("backward", backward)} if backward is not None else set()
        timetable.append(row)
    return timetable


def _row(layout: Layout, pairs: Sequence[Pair], made: set[tuple[str, Item]]) -> list[Pair]:
    """Which of `pairs`, the next of each stage, can run in one tick, after all that was `made`."""
    row: list[Pair] = [_IDLE] * layout.stages
    receivers: set[tuple[str, int]] = set()
    for stage, pair in reversed([*enumerate(pairs)]):
        sent = _sent(layout, pair)
        if pair != _IDLE and _reads(layout, pair) <= made and not sent & receivers:
            row[stage] = pair
            receivers |= sent
    return row


def of_first(microbatches: int, orders: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """`orders` without the work of later micro-batches: what a schedule does that was made for more than there are."""

    def kept(item: Item | None) -> Item | None:
        return item if item is not None and item[0] < microbatches else None

    return [
        [pair for forward, backward in order if (pair := (kept(forward), kept(backward))) != _IDLE] for order in orders
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
