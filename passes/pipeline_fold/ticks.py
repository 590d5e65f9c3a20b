"""Turns the work order of each stage into ticks: every cell runs as early as its inputs and its stage allow.

Schedules in the literature are an order of work for each stage. The times follow from the messages:

    stage 0: F0 F1 B0 B1         tick      0    1    2    3    4    5
    stage 1: F0 B0 F1 B1   ->    stage 0   F0   F1        B0        B1
                                 stage 1        F0   B0   F1   B1

A cell takes one tick and needs results of earlier ticks. A stage receives at most one activation and one cotangent per
tick, from itself or another stage. If two cells would send a stage the same kind of message in one tick, the cell on
the earlier stage waits.

In fact, a backward takes longer than a forward. If neighbours rendezvous at the end of each tick, a stage with a
forward waits for a neighbour with a backward. `one_way` separates the two directions: forward and backward ticks
alternate as long as there is work for the other direction:

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
    """The work of each stage by tick, from its order. Raises DhelixError if the orders deadlock.

    Args:
      one_way: whether all stages go the same way in a tick, alternately forward and backward. No cell may do both.
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
    """Each stage's next cell, from `pairs`, if it can run in the tick after `made`; otherwise an idle cell."""
    row: list[Pair] = [_IDLE] * layout.stages
    receivers: set[tuple[str, int]] = set()
    for stage, pair in reversed([*enumerate(pairs)]):
        sent = _sent(layout, pair)
        if pair != _IDLE and _reads(layout, pair) <= made and not sent & receivers:
            row[stage] = pair
            receivers |= sent
    return row


def of_first(microbatches: int, orders: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """`orders` without the work of padding micro-batches, whose numbers start at `microbatches`."""

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
