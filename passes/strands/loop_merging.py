"""Merges independent loops of the two strands. Loops with equal trip counts become one loop that runs all their bodies.

Before, in one iteration of the strand loop:       After:
    for l < L: policy, forward        beta             for l < L: policy, forward       beta
    for l < L: reference, forward     beta                        reference, forward    beta
    for l < L: policy, backward       alpha                       policy, backward      alpha

1. Pair loops of the two strands in execution order, so that as much work as possible overlaps with the other strand.
   An encoder's forward loop pairs with the decoder's backward loop, and the decoder's forward loop with the encoder's
   backward loop. Both lists keep their order, so pairs cannot depend on each other in a cycle.
2. Merge the remaining loops with any loops that they do not depend on: loops of the other strand, merged loops, and
   large loops of their own strand. The merge that overlaps most work with the other strand comes first.
3. Split a forward loop that has more iterations than a backward loop and stacks nothing. An example is the loop of a
   frozen reference model with more layers. The first iterations merge with the backward loop. The remaining iterations
   become a loop of their own. A loop with stacks is not split, because its residuals could then no longer share one
   buffer.
4. Merge the loops inside merged loops in the same way.

A loop is large if it has at least a quarter of the work of its strand's largest loop. Every large layer loop that does
not overlap with the other strand gets a note with the reason. Loops that only draw random numbers merge like other
loops. But they are not layer loops, so the notes and the headline of the report do not mention them.

Why it is legal: the trip counts of merged loops are proved equal. The loops do not depend on each other by data flow or
control dependencies. Each merge checks this again, because earlier merges add dependencies.
Cost: the live values of one iteration of each loop are alive at once.
Source: DHelix, section 4.1 (arXiv 2411.15871).
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.names import INSIDE, LAYERS
from dhelix.passes.analysis.work import is_layer_loop, loop_work
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import Computation, Instruction
from dhelix.passes.hlo.loop_state import differing_attributes, merge, split
from dhelix.passes.hlo.loops import proved_trip_count

_FORWARD, _BACKWARD = 0, 1


def merge_loops(
    computation: Computation, forward: Sequence[Instruction], backward: Sequence[Instruction], context: PassContext
) -> list[str]:
    """Merges loops of `computation` as the module docstring describes.

    Args:
      forward, backward: loops of each strand, in instruction order. If one of the lists is empty, independent loops of
        the other strand merge with each other, and unmerged loops get no notes.

    Returns:
      One text for each merged layer loop, in execution order. The text names the loop's parts and its trip count. The
      text of a loop inside another one begins with `INSIDE`.
    """
    computation.sort()
    merging = _Merging(computation, forward, backward, context)
    merging.pair_in_order()  # Step 1
    merging.join()  # Step 2
    merging.split_longer()  # Step 3
    merging.join()  # the remainders of split loops
    if forward and backward:
        merging.note_apart()
    merged: list[str] = []
    for group in merging.in_order():
        if group.count > 1:
            nested = merge_loops(group.loop.called[0], *group.inner, context)  # Step 4
            merged += [f"{group} x {group.trips}", *inside(nested)] if is_layer_loop(group.loop) else nested
    return merged


def inside(merged: Sequence[str]) -> list[str]:
    """The texts of merged loops, which are inside another merged loop."""
    return [INSIDE + text.removeprefix(INSIDE) for text in merged]


def loops_of(computation: Computation) -> list[Instruction]:
    return [i for i in computation.instructions if i.opcode == "while"]


@dataclass
class _Group:
    """A loop, with the original loops that it was merged from.

    An attribute "for each strand" is a pair (forward, backward).

    Attributes:
      loop: the loop.
      trips: the loop's trip count; None if the trip count is not proved.
      names: for each strand, the names of the original loops that are now part of `loop`.
      work: for each strand, the work in `loop` (`loop_work`).
      inner: for each strand, the loops in the body of `loop`.
      is_large: whether an original loop has a quarter or more of the work of its strand's largest loop.
    """

    loop: Instruction
    trips: int | None
    names: tuple[tuple[str, ...], tuple[str, ...]]
    work: tuple[int, int]
    inner: tuple[list[Instruction], list[Instruction]]
    is_large: bool

    def __str__(self) -> str:
        return " + ".join(itertools.chain(*self.names))

    @property
    def count(self) -> int:
        return sum(map(len, self.names))

    @property
    def has_both(self) -> bool:
        return all(self.names)


_Pairs = tuple[tuple[int, int], tuple[tuple[_Group, _Group], ...]]  # ((overlapped work, larger work), pairs)


class _Merging:
    """The state of merging the loops of one computation."""

    def __init__(
        self,
        computation: Computation,
        forward: Iterable[Instruction],
        backward: Iterable[Instruction],
        context: PassContext,
    ) -> None:
        self.computation, self.context = computation, context
        self.groups: list[_Group] = []
        for strand, loops in enumerate((forward, backward)):
            work = {loop: loop_work(loop) for loop in loops}
            for loop in work:
                is_large = 4 * work[loop] >= max(work.values())
                self.groups.append(_group(loop, strand, work[loop], is_large))
        self._waits = self._find_waits()

    def in_order(self) -> list[_Group]:
        """All groups, in execution order."""
        place = {i: n for n, i in enumerate(self.computation.instructions)}
        return sorted(self.groups, key=lambda group: place[group.loop])

    def pair_in_order(self) -> None:
        for f, b in _aligned(self._of(_FORWARD), self._of(_BACKWARD)):
            if self._independent(f, b):
                self._merge(f, b)

    def join(self) -> None:
        """Merges pairs of groups until no pair may merge.

        The pair with the most gain comes first. Among pairs of equal gain, the pair whose smaller group has the most
        work comes first.
        """
        while fitting := [pair for pair in itertools.combinations(self.groups, 2) if self._may_merge(*pair)]:
            self._merge(*max(fitting, key=lambda pair: (_gain(*pair), min(sum(g.work) for g in pair))))

    def split_longer(self) -> None:
        """Splits large forward loops with more iterations than backward loops, and merges their first iterations."""
        waiting = [g for g in self._of(_FORWARD) if g.is_large and not g.has_both and not _stacks(g.loop)]
        for longer in waiting:  # this `for` loop appends to `waiting`
            others = [g for g in self._of(_BACKWARD) if _is_shorter(g, longer) and self._independent(g, longer)]
            if not others:
                continue
            other = max(others, key=lambda group: (_gain(group, longer), group.trips))
            assert other.trips and longer.trips  # checked by _is_shorter
            name, trips = longer.loop.name, longer.trips
            try:
                first, rest = split(longer.loop, other.trips, (name, name))
            except PassRefusal:
                continue  # the trip count depends on more than one counter
            self.groups.remove(longer)
            begun, left = (_group(loop, _FORWARD, loop_work(loop), longer.is_large) for loop in (first, rest))
            self.groups += [begun, left]
            self._waits = self._find_waits()
            self.context.note(f"layer loop split: {other.trips} of {trips} iterations merged with {other}", rest)
            self._merge(other, begun)
            waiting.append(left)

    def note_apart(self) -> None:
        for group in self.in_order():
            if group.is_large and not group.has_both and is_layer_loop(group.loop):
                self.context.note(f"layer loop not merged: {self._why_apart(group)}", group.loop)

    def _of(self, strand: int) -> list[_Group]:
        return [group for group in self.groups if group.names[strand]]

    def _may_merge(self, a: _Group, b: _Group) -> bool:
        """Whether the groups can merge and the merge is useful.

        A merge is useful if the groups together hold both strands, or if both groups are large.
        """
        of_use = (a.is_large and b.is_large) or all(one or other for one, other in zip(a.names, b.names, strict=True))
        return of_use and a.trips is not None and a.trips == b.trips and self._independent(a, b)

    def _merge(self, a: _Group, b: _Group) -> None:
        if (b.has_both, bool(b.names[_FORWARD]), sum(b.work)) > (a.has_both, bool(a.names[_FORWARD]), sum(a.work)):
            a, b = b, a
        for key, kept, lost in differing_attributes(a.loop, b.loop):
            self.context.note(f'merged loop has {key}="{kept}" of {a}; {b} had "{lost}"', a.loop)
        names = a.names[0] + b.names[0], a.names[1] + b.names[1]
        loop, copies_a, copies_b = merge(a.loop, b.loop, LAYERS if all(names) else a.loop.name)
        ahead, back = ([copies_a[i] for i in a.inner[s]] + [copies_b[i] for i in b.inner[s]] for s in (0, 1))
        work = a.work[0] + b.work[0], a.work[1] + b.work[1]
        self.groups = [group for group in self.groups if group is not a and group is not b]
        self.groups.append(_Group(loop, a.trips, names, work, (ahead, back), a.is_large or b.is_large))
        self._waits = self._find_waits()

    def _find_waits(self) -> dict[Instruction, int]:
        """For each loop, a bit mask of the `groups` that it depends on."""
        bit = {group.loop: 1 << n for n, group in enumerate(self.groups)}
        reached: dict[Instruction, int] = {}
        found: dict[Instruction, int] = {}
        for instruction in self.computation.instructions:
            mask = 0
            for source in itertools.chain(instruction.operands, instruction.control_predecessors):
                mask |= reached.get(source, 0)
            if instruction in bit:
                found[instruction] = mask
                mask |= bit[instruction]
            if mask:
                reached[instruction] = mask
        return found

    def _waits_for(self, a: _Group, b: _Group) -> bool:
        number = next(n for n, group in enumerate(self.groups) if group is b)
        return bool(self._waits[a.loop] >> number & 1)

    def _independent(self, a: _Group, b: _Group) -> bool:
        return not self._waits_for(a, b) and not self._waits_for(b, a)

    def _why_apart(self, group: _Group) -> str:
        """Why a group holds no loop of the other strand."""
        if group.trips is None:
            return "its trip count is not proved"
        strand = _BACKWARD if group.names[_FORWARD] else _FORWARD
        others = [other for other in self.in_order() if other.names[strand]]
        alike = [other for other in others if other.trips == group.trips]
        if not alike:
            counts = sorted({"an unproved number" if o.trips is None else str(o.trips) for o in others})
            own = f"{group.trips} iteration{'s' * (group.trips != 1)}"
            return f"it has {own}; the other strand's loops have {', '.join(counts)}"
        return "; ".join(self._why_not_with(group, other, strand) for other in alike)

    def _why_not_with(self, group: _Group, other: _Group, strand: int) -> str:
        """Why `group` cannot merge with `other`, which has an equal trip count: one group depends on the other."""
        earlier, later = (group, other) if self._waits_for(other, group) else (other, group)
        name = " + ".join(other.names[strand])
        when = "after" if later is other else "before"
        between = [g for g in self.groups if self._waits_for(g, earlier) and self._waits_for(later, g)]
        merged = next((g for g in (other, *between) if g.has_both), None)
        since = "" if merged is None else f", because {merged} are one loop"
        return f"{name}, the other strand's loop with the same trip count, must run {when} it{since}"


def _group(loop: Instruction, strand: int, work: int, is_large: bool) -> _Group:
    name, inner = (loop.name,), loops_of(loop.called[0])
    if strand == _FORWARD:
        return _Group(loop, proved_trip_count(loop), (name, ()), (work, 0), (inner, []), is_large)
    return _Group(loop, proved_trip_count(loop), ((), name), (0, work), ([], inner), is_large)


def _aligned(forward: Sequence[_Group], backward: Sequence[_Group]) -> tuple[tuple[_Group, _Group], ...]:
    """The pairs of groups that together overlap the most work.

    The groups of a pair have equal trip counts, and the pairs keep the order of both lists. Of several choices that
    overlap equal work, the choice with the larger loops wins. So a loop that computes gradients wins over a loop that
    recomputes residuals.
    """
    row: list[_Pairs] = [
        ((0, 0), ()) for _ in range(len(backward) + 1)
    ]  # row[n]: the best pairs between the groups of `forward` so far and the first n groups of `backward`
    for f in forward:
        above, row = row, row[:1]
        for n, b in enumerate(backward):
            choices: list[_Pairs] = [above[n + 1], row[n]]
            if f.trips is not None and f.trips == b.trips:
                (hidden, work), pairs = above[n]
                both = f.work[_FORWARD], b.work[_BACKWARD]
                choices.append(((hidden + min(both), work + max(both)), (*pairs, (f, b))))
            row.append(max(choices, key=lambda choice: choice[0]))
    return row[-1][1]


def _gain(a: _Group, b: _Group) -> int:
    """How much more work overlaps with the other strand if the two loops become one loop."""
    both = [one + other for one, other in zip(a.work, b.work, strict=True)]
    return min(both) - min(a.work) - min(b.work)


def _is_shorter(a: _Group, b: _Group) -> bool:
    return a.trips is not None and b.trips is not None and 0 < a.trips < b.trips


def _stacks(loop: Instruction) -> bool:
    """Whether the loop stacks a result of each iteration."""
    return any(value.opcode == "dynamic-update-slice" for value in loop.called[0].root.operands)
