"""What NCCL is asked about while a program runs: the collectives of each communicator, in launch order.

    sequences(module)      {groups: [Question(all_gather.3, "all-gather", 67108864), ...]}

NCCL asks a tuner plugin about each collective before it launches it. It says type, size and communicator, not the
instruction. So the plugin needs this order (`runtime/tuning/nccl_tuner.c`). NCCL does not ask about all-to-alls,
permutes, Triton's collectives and collectives on one device. With symmetric memory, it does not ask at all.

A communicator has one group of devices. XLA may use another communicator for collectives on another stream. So groups
with collectives on several streams have a sequence for each stream as well; the plugin takes the one that fits.

Cost: linear in the number of launches of a step, loops multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dhelix.passes.analysis.collectives import Groups, flattened_groups, is_done, payloads
from dhelix.passes.analysis.execution import collective_launches
from dhelix.passes.analysis.streams import stream_of
from dhelix.passes.hlo import HloModule, Instruction, shapes

ASKED = ("all-gather", "reduce-scatter", "all-reduce", "collective-broadcast")
"""Kinds of collectives about which NCCL asks."""

SENDS = ("all-to-all", "ragged-all-to-all", "collective-permute", "send")
"""Kinds of collectives that NCCL runs as sends and receives."""

_ALIKE = 4
"""NCCL asks once about collectives of a group whose sizes are within this factor of the smallest."""

MOST = 1 << 20
"""A longer sequence is cut. A step launches fewer collectives."""


@dataclass(frozen=True)
class Question:
    """A question of NCCL.

    Attributes:
      instruction: the collective, or the start of it.
      kind: one of ASKED.
      bytes: the larger of what a rank sends and what it receives.
    """

    instruction: Instruction
    kind: str
    bytes: int


def sequences(module: HloModule) -> dict[tuple[Groups, int | None], list[Question]]:
    """The questions of one step, for each groups of devices and each stream.

    The stream is None in the sequence of all streams.
    """
    found: dict[tuple[Groups, int | None], list[Question]] = {}
    known: dict[Instruction, list[tuple[Groups, Question]]] = {}
    for launch in collective_launches(module.entry):
        if launch not in known:
            known[launch] = questions(launch)
        for groups, question in known[launch]:
            for stream in (None, stream_of(launch)):
                sequence = found.setdefault((groups, stream), [])
                if len(sequence) < MOST:
                    sequence.append(question)
    streams: dict[Groups, int] = {}
    for groups, _ in found:
        streams[groups] = streams.get(groups, 0) + 1
    return {(g, stream): each for (g, stream), each in found.items() if stream is None or streams[g] > 2}


def has_sends(module: HloModule) -> bool:
    """Whether a step launches collectives that NCCL runs as sends and receives."""
    return any(
        payload.opcode.removesuffix("-start") in SENDS
        for launch in set(collective_launches(module.entry))
        for payload in payloads(launch)
    )


def questions(launch: Instruction) -> list[tuple[Groups, Question]]:
    """What NCCL asks when an instruction is launched, with the groups of devices; empty if it asks nothing."""
    return list(_questions(launch))


def _questions(launch: Instruction) -> Iterator[tuple[Groups, Question]]:
    """An instruction with several collectives or buffers is one group of NCCL. The largest buffer's kind is first."""
    if is_done(launch):
        return
    if launch.opcode == "fusion" or any(i.opcode == "fusion" for c in launch.called for i in c.instructions):
        return  # a kernel of Triton
    sizes: dict[tuple[Groups, str, int], list[int]] = {}
    for collective in payloads(launch):
        kind = collective.opcode.removesuffix("-start")
        groups = flattened_groups(collective)
        if kind not in ASKED or max(map(len, groups), default=2) < 2:
            continue
        for operand in collective.operands:
            size = shapes.byte_size(operand.shape)
            if kind == "all-gather":
                size *= max(map(len, groups), default=1)
            sizes.setdefault((groups, kind, operand.shape.element_type), []).append(size)
    for (groups, kind, _), each in sorted(sizes.items(), key=lambda one: -max(one[1])):
        for total in _together(sorted(each)):
            yield groups, Question(launch, kind, total)


def _together(sizes: list[int]) -> Iterator[int]:
    """Sums of sizes, ascending, about each of which NCCL asks once."""
    first = total = 0
    for size in sizes:
        if total and size >= _ALIKE * first:
            yield total
            total = 0
        if not total:
            first = size
        total += size
    if total:
        yield total
