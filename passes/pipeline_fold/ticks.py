"""Assigns work to ticks, given the order of work of each stage. Each stage runs its work as early as possible.

In the literature, a schedule is an order of work for each stage. The times follow from the messages:

    stage 0: F0 F1 B0 B1         tick      0    1    2    3    4    5
    stage 1: F0 B0 F1 B1   ->    stage 0   F0   F1        B0        B1
                                 stage 1        F0   B0   F1   B1

A cell is the work of one stage in one tick: a forward, a backward, or both. A cell needs results of earlier ticks. A
stage receives at most one activation and one cotangent per tick, from itself or another stage. If two cells would send
the same kind of message to the same stage in one tick, the cell on the earlier stage waits.

The ticks of the picture have equal length, but a backward takes longer than a forward. If neighbours rendezvous at the
end of each tick, a stage with a forward waits for a neighbour with a backward. `one_way` separates forwards and
backwards: forward ticks and backward ticks alternate while there is work for both:

    stage 0: F0 F1 F2 B0 F3 B1      tick      0    1    2    3    4    5    6
    stage 1: F0 B0 F1 B1 F2 B2      stage 0   F0   F1        F2   B0   F3   B1
                                    stage 1        F0   B0   F1   B1   F2   B2
"""

from __future__ import annotations

from collections.abc import Sequence

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.schedule import Layout
from dhelix.passes.pipeline_fold.slots import Item

# (forward, backward): a cell without its slots.
Pair = tuple[Item | None, Item | None]
_IDLE: Pair = (None, None)


def in_ticks(layout: Layout, orders: Sequence[Sequence[Pair]], *, one_way: bool = False) -> list[list[Pair]]:
    """The work of each stage in each tick.

    Args:
      orders: the cells of each stage, in order.
      one_way: whether each tick has only forwards or only backwards, alternately. No cell may have both.

    Raises:
      DhelixError: the orders deadlock.
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
            raise DhelixError(f"the stages deadlock in tick {len(timetable)}: {waiting} has no input")
        for stage, (forward, backward) in enumerate(row):
            position[stage] += (forward, backward) != _IDLE
            made |= {("forward", forward)} if forward is not None else set()
            made |= {("backward", backward)} if backward is not None else set()
        timetable.append(row)
    return timetable


def _row(layout: Layout, pairs: Sequence[Pair], made: set[tuple[str, Item]]) -> list[Pair]:
    """The cells of the next tick: for each stage, its cell in `pairs` if it can run, otherwise an idle cell.

    `made` has the results of earlier ticks.
    """
    row: list[Pair] = [_IDLE] * layout.stages
    receivers: set[tuple[str, int]] = set()
    for stage, pair in reversed([*enumerate(pairs)]):
        sent = _sent(layout, pair)
        if pair != _IDLE and _reads(layout, pair) <= made and not sent & receivers:
            row[stage] = pair
            receivers |= sent
    return row


def of_first(microbatches: int, orders: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """`orders` with only the work of the first `microbatches` micro-batches. The others are padding."""

    def kept(item: Item | None) -> Item | None:
        return item if item is not None and item[0] < microbatches else None

    return [
        [pair for forward, backward in order if (pair := (kept(forward), kept(backward))) != _IDLE] for order in orders
    ]


def _reads(layout: Layout, pair: Pair) -> set[tuple[str, Item]]:
    """The results that `pair` needs before it can start."""
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
    """The (kind, receiver) of each message that `pair` sends."""
    sent = set()
    for kind, item, step in (("activation", pair[0], 1), ("cotangent", pair[1], -1)):
        reader = -1 if item is None else item[1] + step
        if 0 <= reader < layout.chunks:
            sent.add((kind, layout.stage_of[reader]))
    return sent
