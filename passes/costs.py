"""What each HLO instruction costs on a GPU, and on which lane it runs.

Scheduled GPU programs are what this is made for: GEMMs and attention are custom calls or Triton fusions,
elementwise work is fused, collectives are async pairs whose whole cost stands at the start. Lowered programs
get costs too, coarser ones: what XLA will fuse counts by what it writes, or nothing.

Without a profile every cost is the roofline's (`dhelix.profiles.roofline`), so a guess. With one,
`Costs(hardware, Estimator(profile, hardware, setting))`, times of scheduled programs are what was measured or
what follows from it, and `Cost.source` says which.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from dhelix.passes.collectives import find_collective, is_done
from dhelix.passes.hlo import Computation, Instruction, shapes
from dhelix.passes.hlo.loops import proved_trip_count
from dhelix.passes.operator_keys import CONTROL_FLOW, FREE_OPCODES, OperatorKeys
from dhelix.passes.operator_work import Work, backend_config, work_of
from dhelix.profiles import roofline
from dhelix.profiles.estimates import Estimator, Source
from dhelix.profiles.hardware import Hardware


class Lane(enum.Enum):
    """What runs one thing at a time: the SMs, the links inside a node, the network between nodes."""

    COMPUTE = "compute"
    COMM = "comm"
    COMM_INTER = "comm-inter"


@dataclass(frozen=True, slots=True)
class Cost:
    """One execution of an instruction that runs alone.

    Attributes:
      seconds: for a loop, a call or a conditional the sum over everything inside, nothing overlapped.
      bytes: of device memory read and written; for a collective, what each device sends.
      source: what `seconds` rests on; of a sum, its least certain part.
    """

    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    lane: Lane = Lane.COMPUTE
    source: Source = Source.GUESS


FREE = Cost(0.0, source=Source.MEASURED)

# Not kernels of their own once XLA has fused.
_FUSED_AWAY = frozenset("broadcast reshape iota compare convert".split())


class Costs(dict[Instruction, Cost]):
    """Costs by instruction, computed when first asked for: `Costs(hardware)[instruction]`.

    Args:
      estimator: gives times from a profile; without it the roofline does.
      implementation: how collectives run (`profiles.keys.IMPLEMENTATIONS`), for the estimator.
    """

    def __init__(self, hardware: Hardware, estimator: Estimator | None = None, implementation: str = "nccl") -> None:
        super().__init__()
        self.hardware, self.estimator = hardware, estimator
        self.operator_keys = OperatorKeys(hardware.gpus_per_node, implementation)

    def __missing__(self, instruction: Instruction) -> Cost:
        cost = instruction_cost(instruction, self.hardware, self.__getitem__)
        if self.estimator is not None and instruction.computation.module.is_scheduled:
            key = self.operator_keys[instruction]
            if key is not None:
                estimate = self.estimator.solo(key)
                cost = replace(cost, seconds=estimate.seconds, source=estimate.source)
        self[instruction] = cost
        return cost


def instruction_cost(
    instruction: Instruction, hardware: Hardware, inner: Callable[[Instruction], Cost] | None = None
) -> Cost:
    """The roofline's cost of `instruction`; `inner` gives costs of instructions inside what it calls, where
    they are known."""
    inner = inner or (lambda i: instruction_cost(i, hardware))
    opcode = instruction.opcode
    if opcode in FREE_OPCODES or is_done(instruction):
        return FREE
    if opcode in CONTROL_FLOW:
        return _calls_cost(instruction, inner)
    collective = find_collective(instruction)
    if collective is not None:
        group = collective.group_size(default=hardware.gpus_per_node)
        nodes = collective.nodes(hardware.gpus_per_node)
        seconds = roofline.collective_seconds(collective.kind, collective.size, group, nodes, hardware)
        sent = roofline.wire_bytes(collective.kind, collective.size, group)
        return Cost(seconds, 0.0, sent, Lane.COMM_INTER if nodes > 1 else Lane.COMM)
    if opcode == "async-start":
        return inner(instruction.called[0].root)
    if instruction.computation.module.is_scheduled or opcode in ("fusion", "dot", "custom-call"):
        return _work_cost(work_of(instruction), hardware)
    moved = 0 if opcode in _FUSED_AWAY else shapes.byte_size(instruction.shape)
    return Cost(roofline.memory_seconds(moved, hardware) - hardware.kernel_seconds, 0.0, moved)


def trip_count(loop: Instruction) -> int | None:
    """How often the body of a `while` runs: as the compiler noted it, or proved from constants; else None."""
    known = backend_config(loop).get("known_trip_count")
    if known is not None:
        return int(known["n"])
    return proved_trip_count(loop)


def sequence_of(computation: Computation) -> list[Instruction]:
    """The order in which a computation runs: its schedule, or where it has none, as it stands."""
    return computation.module.schedule.get(computation, computation.instructions)


def _calls_cost(instruction: Instruction, inner: Callable[[Instruction], Cost]) -> Cost:
    """A loop's body times its trip count (once if unknown), a call's callee, the longest branch."""
    count = (trip_count(instruction) or 1) if instruction.opcode == "while" else 1
    called = instruction.called[:1] if instruction.opcode == "while" else instruction.called
    longest = max((_sum([inner(i) for i in c.instructions]) for c in called), key=lambda c: c.seconds, default=FREE)
    return replace(longest, seconds=count * longest.seconds, flops=count * longest.flops, bytes=count * longest.bytes)


def _sum(costs: list[Cost]) -> Cost:
    return Cost(
        sum(c.seconds for c in costs),
        sum(c.flops for c in costs),
        sum(c.bytes for c in costs),
        source=max((c.source for c in costs), key=lambda s: s.rank, default=Source.MEASURED),
    )


def _work_cost(work: Work, hardware: Hardware) -> Cost:
    if work.unit == "product":
        seconds = roofline.gemm_seconds(work.flops, work.bytes, hardware, work.bits)
    elif work.unit == "attention":
        seconds = roofline.attention_seconds(work.flops, work.bytes, hardware)
    else:
        seconds = roofline.memory_seconds(work.bytes, hardware)
    return Cost(seconds, work.flops, work.bytes)
