"""Groups the ticks of a schedule into a few loops over similar ticks, for the executor and the evaluator.

    ticks of W, P = 2, M = 4      0 1 2 3 | 4 5 6 7 8 9 | 10 | 11 12 13
    work                             F    |  F and B    |  B |    B
    phases                         loop   |    loop     |    |  each alone
    embedding, forward            x   x     x   x
    head                                    x   x   x     x
    embedding, backward                           x   x        x     x

A phase is a loop. One iteration of a phase (a round) executes several ticks, so the loop's body has a place for each of
these ticks. Ticks at the same place of the body do the same kinds of work. A way is a pair (from stage, to stage) of a
message. Ticks at the same place send their messages with one collective-permute over the union of their ways. So each
phase costs what its ticks cost: a warm-up tick computes no backward pass, and only ticks that need the head compute the
head.

A run is one tick, or several consecutive ticks of a lockstep schedule with the same content. A run of several ticks is
a loop within the loop of the phase. For example, take interleaved SI with P stages and v chunks per stage: P ticks need
the head, the next (v - 1) P ticks do not, and so on. The body of a phase has at most `LONGEST_PERIOD` runs. Runs of
several ticks are used if they leave less to compile.

A collective-permute is a rendezvous of each pair of stages that it names, in every tick that holds the
collective-permute (`message_times.py`). Neighbours without messages should not rendezvous. So if a schedule is not
lockstep, a loop may add ways to a tick only if they cost less than the loop saves in compilation.

Messages leave at the end of their tick. If all stages compute only in the other direction in the next tick, no stage
needs the messages yet. Such messages are late: they overlap with the next tick:

    interleaved 1F1B      F               B               F               B
    exchanges                     activations     cotangents      activations
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dhelix.passes.pipeline_fold.schedule import Schedule
from dhelix.passes.pipeline_fold.transfers import Direction, Hop, handed_over

LONGEST_PERIOD = 4


@dataclass(frozen=True)
class Messages:
    """Messages of one kind in one tick: activations or cotangents. Ways are (from stage, to stage) pairs.

    Attributes:
      ways: ways of the messages that the tick makes.
      late: whether these messages overlap with the next tick instead of leaving at the end of this tick; None if the
        tick makes no messages.
      before: ways of the previous tick's messages, if those messages are late.
    """

    ways: tuple[Hop, ...] = ()
    late: bool | None = None
    before: tuple[Hop, ...] = ()

    @property
    def now(self) -> tuple[Hop, ...]:
        """The ways of the messages that leave at the end of this tick; empty if the messages are late."""
        return () if self.late else self.ways

    def joined(self, other: Messages) -> Messages | None:
        """Messages that serve both ticks; None if one collective-permute cannot serve both.

        `self` and `other` are the messages of two ticks at the same place of a loop's body.
        """
        ways, before = _joined_ways(self.ways, other.ways), _joined_ways(self.before, other.before)
        if ways is None or before is None or {self.late, other.late} >= {True, False}:
            return None
        return Messages(ways, other.late if self.late is None else self.late, before)


@dataclass(frozen=True)
class Pattern:
    """The content of the ticks at one place of a phase's body.

    Attributes:
      forward: whether some stages compute only a forward.
      backward: whether some stages compute only a backward.
      both: whether some stages compute a forward and a backward, in one loop over layers.
      embed, head, embed_backward: whether the tick computes the embedding, the head, and the embedding's backward.
      activations: messages from the tick's forwards.
      cotangents: messages from the tick's backwards.
    """

    forward: bool
    backward: bool
    both: bool
    embed: bool
    head: bool
    embed_backward: bool
    activations: Messages
    cotangents: Messages

    @property
    def exchanges(self) -> int:
        """Number of ways of all exchanges in the tick, with late exchanges of the previous tick."""
        return sum(len(ways) for kind in (self.activations, self.cotangents) for ways in (kind.now, kind.before))

    @property
    def goes_forward(self) -> bool:
        return self.forward or self.both

    @property
    def goes_backward(self) -> bool:
        return self.backward or self.both


# (pattern, number of consecutive ticks that hold it)
type Run = tuple[Pattern, int]


@dataclass(frozen=True)
class Phase:
    """A loop that executes `runs`, in order, `rounds` times. Its first tick is tick `first` of the schedule."""

    first: int
    rounds: int
    runs: tuple[Run, ...]

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns of the ticks of one round."""
        return tuple(pattern for pattern, ticks in self.runs for _ in range(ticks))


def phases(schedule: Schedule) -> tuple[Phase, ...]:
    """The schedule's ticks, in order, as a small number of loops."""
    ticks = [_pattern(schedule, tick) for tick in range(len(schedule.ticks))]
    if not schedule.lockstep:
        return tuple(_loops([(pattern, 1) for pattern in ticks], 0, lockstep=False))
    ticks = _with_common_ways(ticks)
    result, first = list[Phase](), 0
    while first < len(ticks):
        end = next((t for t in range(first, len(ticks)) if _ways(ticks[t]) != _ways(ticks[first])), len(ticks))
        single, runs = [(tick, 1) for tick in ticks[first:end]], _runs(ticks[first:end])
        result += min(([*_loops(each, first, lockstep=True)] for each in (single, runs)), key=_bodies)
        first = end
    return tuple(result)


def patterns(schedule: Schedule) -> tuple[Pattern, ...]:
    """The pattern of each tick, as compiled in the loops of `phases`."""
    return tuple(pattern for phase in phases(schedule) for pattern in phase.patterns * phase.rounds)


def _with_common_ways(ticks: Sequence[Pattern]) -> list[Pattern]:
    """Gives every tick that sends the ways of all ticks, separately for activations and cotangents.

    If one collective-permute cannot have all ways of a kind, these ways stay as they are. `ticks` are those of a
    lockstep schedule, in which an extra way costs nothing. If two stages swap messages in each tick, an all-gather can
    replace their collective-permute.
    """

    def common(kind: str) -> tuple[Hop, ...] | None:
        return _joined_ways([way for tick in ticks for way in getattr(tick, kind).ways], ())

    found = {kind: ways for kind in ("activations", "cotangents") if (ways := common(kind))}
    return [
        replace(tick, **{k: replace(m, ways=ways) for k, ways in found.items() if (m := getattr(tick, k)).ways})
        for tick in ticks
    ]


def _bodies(loops: Sequence[Phase]) -> int:
    return sum(len(loop.runs) for loop in loops)


def _runs(ticks: Sequence[Pattern]) -> list[Run]:
    """Ticks of a lockstep schedule in as few runs as possible.

    No tick gets an embedding or a head (`_ends`) that it does not need.
    """
    runs = [(ticks[0], 1)]
    for tick in ticks[1:]:
        pattern, length = runs[-1]
        joined = _join(pattern, tick, lockstep=True) if _ends(pattern) == _ends(tick) else None
        runs[-1:] = [(joined, length + 1)] if joined else [(pattern, length), (tick, 1)]
    return runs


def _loops(runs: Sequence[Run], tick: int, lockstep: bool) -> Iterator[Phase]:
    """Yields loops over `runs`. The first run begins at tick `tick`."""
    while runs:
        candidates = [_longest(runs, period, lockstep) for period in range(1, LONGEST_PERIOD + 1)]
        worth = [_worth(runs, body, rounds, lockstep) for body, rounds in candidates]
        body, rounds = candidates[worth.index(max(worth))]
        if rounds == 1:
            body = body[:1]
        runs = runs[rounds * len(body) :]
        if len(body) == 1:
            body, rounds = [(body[0][0], 1)], rounds * body[0][1]
        yield Phase(tick, rounds, tuple(body))
        tick += rounds * sum(ticks for _, ticks in body)


def _worth(runs: Sequence[Run], body: Sequence[Run], rounds: int, lockstep: bool) -> float:
    """The worth of a loop: the number of runs that need not be compiled, minus the cost of the ways that it adds.

    The loop executes the first ones of `runs`, in `rounds` iterations of `body`. The sender and the receiver of a
    message wait for each other. Neighbours without messages should not wait: a stage with a forward would wait in each
    tick for a stage with a backward, which takes twice as long. If all stages compute in the same direction, they take
    equally long. Then an extra way costs nothing if the tick has an exchange anyway. In lockstep, no extra way costs
    anything, because all stages wait for each other.
    """
    covered = rounds * len(body)
    if lockstep:
        return covered - len(body)
    stages = 1 + max((max(hop) for pattern, _ in body for hop in pattern.activations.ways), default=0)

    def added(held: Pattern, own: Pattern) -> float:
        if held.goes_forward and held.goes_backward:
            return (held.exchanges - own.exchanges) / stages
        return held.exchanges > 0 and own.exchanges == 0

    pairs = zip([*body] * rounds, runs[:covered], strict=True)
    return covered - len(body) - sum(added(held, own) for (held, _), (own, _) in pairs)


def _longest(runs: Sequence[Run], period: int, lockstep: bool) -> tuple[list[Run], int]:
    """The longest loop that starts with the first run and has `period` runs in its body: its body and its rounds."""
    body, covered = list(runs[:period]), 1
    for start in range(period, len(runs) - period + 1, period):
        joined = [_join_runs(a, b, lockstep) for a, b in zip(body, runs[start : start + period], strict=True)]
        if any(run is None for run in joined):
            break
        body, covered = [run for run in joined if run is not None], covered + 1
    return body, covered


def _join_runs(a: Run, b: Run, lockstep: bool) -> Run | None:
    """One run that serves both runs, or None.

    A run of several ticks has no embedding and no head (`_ends`) that one of its ticks does not need.
    """
    (first, ticks), (second, others) = a, b
    if ticks != others or (ticks > 1 and _ends(first) != _ends(second)):
        return None
    joined = _join(first, second, lockstep)
    return None if joined is None else (joined, ticks)


def _ends(pattern: Pattern) -> tuple[bool, bool, bool]:
    return pattern.embed, pattern.head, pattern.embed_backward


def _join(a: Pattern, b: Pattern, lockstep: bool) -> Pattern | None:
    """One pattern that serves both patterns, or None.

    In lockstep, the head costs time in every tick that computes it. So two patterns are joined only if both need the
    head, or if neither does. The same holds for the embedding, except in SI blocks. The first and last SI blocks
    compute an embedding that they do not need, because each further body takes long to compile.

    If the schedule is not lockstep, one pattern must include all kinds of work (`_kinds`) of the other pattern.
    Otherwise each tick would have a loop over layers that does nothing, for work that only the other tick has.
    """
    activations, cotangents = a.activations.joined(b.activations), a.cotangents.joined(b.cotangents)
    if lockstep:
        alike = a.head == b.head and (a.both or _ends(a) == _ends(b))
    else:
        alike = _kinds(a) <= _kinds(b) or _kinds(b) <= _kinds(a)
    if activations is None or cotangents is None or not alike:
        return None
    return Pattern(
        a.forward or b.forward,
        a.backward or b.backward,
        a.both or b.both,
        a.embed or b.embed,
        a.head or b.head,
        a.embed_backward or b.embed_backward,
        activations,
        cotangents,
    )


def _joined_ways(a: Sequence[Hop], b: Sequence[Hop]) -> tuple[Hop, ...] | None:
    ways = sorted({*a, *b})
    senders, receivers = {sender for sender, _ in ways}, {receiver for _, receiver in ways}
    return tuple(ways) if len(senders) == len(receivers) == len(ways) else None


def _kinds(pattern: Pattern) -> frozenset[str]:
    """The kinds of loops over layers in a tick: `forward`, `backward` and `both`."""
    return frozenset(kind for kind in ("forward", "backward", "both") if getattr(pattern, kind))


def _ways(pattern: Pattern) -> tuple[bool, bool]:
    return pattern.goes_forward, pattern.goes_backward


def _pattern(schedule: Schedule, tick: int) -> Pattern:
    cells, last = schedule.ticks[tick], schedule.layout.chunks - 1
    forward = [cell.forward for cell in cells if cell.forward is not None]
    backward = [cell.backward for cell in cells if cell.backward is not None]
    both = any(cell.forward is not None and cell.backward is not None for cell in cells)
    if schedule.lockstep:
        both = bool(forward and backward)
    return Pattern(
        forward=bool(forward) and not (schedule.lockstep and both),
        backward=bool(backward) and not (schedule.lockstep and both),
        both=both,
        embed=any(work.chunk == 0 for work in forward),
        head=any(work.chunk == last for work in backward),
        embed_backward=any(work.chunk == 0 for work in backward),
        activations=_messages(schedule, tick, "forward"),
        cotangents=_messages(schedule, tick, "backward"),
    )


def _messages(schedule: Schedule, tick: int, direction: Direction) -> Messages:
    def ways(tick: int) -> tuple[Hop, ...]:
        return tuple(sorted(hop for hop in handed_over(schedule, tick, direction) if hop[0] != hop[1]))

    def late(tick: int) -> bool | None:
        """Whether the messages of `tick` are late; None if there are none.

        Messages from a stage to itself are never late.
        """
        if not handed_over(schedule, tick, direction):
            return None
        return bool(ways(tick)) and not schedule.lockstep and not _goes(schedule, tick + 1, direction)

    return Messages(ways(tick), late(tick), ways(tick - 1) if tick and late(tick - 1) else ())


def _goes(schedule: Schedule, tick: int, direction: Direction) -> bool:
    return any(getattr(cell, direction) is not None for cell in schedule.ticks[tick])
