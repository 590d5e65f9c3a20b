"""The roofline cost and the lane of an HLO instruction. The cost is used if there is no measured time.

These costs are made for scheduled GPU programs. In such programs, GEMMs and attention are custom calls or Triton
fusions, elementwise work is fused, and collectives are async pairs. The start of a pair has its whole cost. Lowered
programs get coarser costs: an instruction that XLA will fuse counts by the bytes that it writes, or not at all.
`costs.Costs` replaces these costs by measured times.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from dhelix.passes.analysis.collectives import Collective, find_collective, is_done
from dhelix.passes.analysis.configuration import backend_config
from dhelix.passes.analysis.execution import counted_trips, entered
from dhelix.passes.analysis.streams import stream_of
from dhelix.passes.evaluation.operator_keys import FREE_OPCODES
from dhelix.passes.evaluation.operator_work import Work, work_of
from dhelix.passes.evaluation.transfers import SENDS, Transfer, find_transfer, host_bytes
from dhelix.passes.hlo import Computation, Instruction, shapes
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.estimates import roofline
from dhelix.profiles.estimates.estimator import Source
from dhelix.profiles.hardware import Hardware


class Lane(enum.Enum):
    """Queues that run one thing at a time: kernels, XLA's communication streams, and copies to and from the host."""

    COMPUTE = "compute"
    COMM = "comm"
    COMM_2 = "comm-2"
    HOST = "host"


COMMUNICATION = (Lane.COMM, Lane.COMM_2)
"""The lanes of the communication streams, by number (`passes/analysis/streams.py`)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one execution of an instruction that runs alone.

    Attributes:
      seconds: for a loop, call or conditional, the sum over everything inside, without overlap.
      bytes: device-memory bytes read and written; for a collective or transfer, the bytes that each device sends.
      source: origin of `seconds`; for a sum, the origin of its least certain part.
      launch: seconds for which compute waits before a collective begins.
      communication: seconds of communication within `seconds`. For a collective matmul kernel, the seconds that its
        collective takes alone.
      between_nodes: whether the communication uses the network between nodes.
    """

    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    lane: Lane = Lane.COMPUTE
    source: Source = Source.GUESS
    launch: float = 0.0
    communication: float = 0.0
    between_nodes: bool = False


FREE = Cost(0.0, source=Source.MEASURED)

# Opcodes that XLA fuses into other kernels.
_FUSED_AWAY = frozenset("broadcast reshape iota compare convert".split())


def instruction_cost(
    instruction: Instruction, hardware: Hardware, inner: Callable[[Instruction], Cost] | None = None
) -> Cost:
    """The roofline's cost of `instruction`.

    Args:
      inner: gives the costs of instructions in called computations; by default, these are the roofline's.
    """
    inner = inner or (lambda i: instruction_cost(i, hardware))
    opcode = instruction.opcode
    if opcode in FREE_OPCODES or is_done(instruction):
        return FREE
    if opcode in CONTROL_FLOW:
        return _calls_cost(instruction, inner)
    collective = find_collective(instruction)
    if collective is not None:
        cost = _collective_cost(collective, hardware)
        return replace(cost, lane=COMMUNICATION[min(stream_of(instruction), len(COMMUNICATION) - 1)])
    transfer = find_transfer(instruction)
    if transfer is not None:
        return _transfer_cost(transfer, hardware)
    if opcode in SENDS:
        return FREE  # the message counts at the recv of the same channel
    if opcode == "async-start":
        return _inside_cost(instruction.called[0], inner)
    if instruction.computation.module.is_scheduled or opcode in ("fusion", "dot", "custom-call"):
        cost = _work_cost(work_of(instruction), hardware)
        waits = roofline.host_seconds(host_bytes(instruction), hardware)
        return replace(cost, seconds=waits) if waits > cost.seconds else cost
    moved = 0 if opcode in _FUSED_AWAY else shapes.byte_size(instruction.shape)
    return Cost(roofline.memory_seconds(moved, hardware) - hardware.kernel_seconds, 0.0, moved)


def _collective_cost(collective: Collective, hardware: Hardware) -> Cost:
    """Cost of a collective and its `others`. They share the links, so their seconds and bytes add up."""
    seconds = sent = 0.0
    inside = True
    for part in (collective, *collective.others):
        group, nodes = part.group_size(default=hardware.gpus_per_node), part.nodes(hardware.gpus_per_node)
        seconds += roofline.collective_seconds(part.kind, part.size, group, nodes, hardware)
        sent += roofline.wire_bytes(part.kind, part.size, group)
        inside = inside and nodes == 1
    return Cost(seconds, 0.0, sent, Lane.COMM, between_nodes=not inside)


def _transfer_cost(transfer: Transfer, hardware: Hardware) -> Cost:
    """Cost of a transfer. A message costs as much as a permute of the same size."""
    if transfer.host:
        return Cost(roofline.host_seconds(transfer.size, hardware), 0.0, transfer.size, Lane.HOST)
    return _collective_cost(Collective("collective-permute", transfer.size, transfer.groups), hardware)


def _inside_cost(called: Computation, inner: Callable[[Instruction], Cost]) -> Cost:
    """Cost of the kernels that an async pair runs one after the other. Usually, there is only one."""
    costs = [cost for cost in map(inner, called.instructions) if cost.seconds > 0.0]
    return costs[0] if len(costs) == 1 else _sum(costs)


def constant_rates(hardware: Hardware, cost: Cost) -> tuple[float, float]:
    """Assumed rates of compute, and of a collective or transfer with `cost`, while both run.

    A host transfer and compute do not slow each other: copy engines use no SM, and the host's link is much slower than
    device memory.
    """
    return (1.0, 1.0) if cost.lane is Lane.HOST else hardware.rates(cost.between_nodes)


def made_synchronous(start: Instruction) -> bool:
    """Whether XLA decided to run a pair synchronously. Then nothing overlaps with it, wherever its done is.

    XLA versions until 2024 marked such a pair. Newer versions replace it by its synchronous form.
    """
    return bool((backend_config(start).get("collective_backend_config") or {}).get("is_sync"))


def _calls_cost(instruction: Instruction, inner: Callable[[Instruction], Cost]) -> Cost:
    """Cost of all iterations of a loop (one if their number is unknown), of a callee, or of the longest branch."""
    count = counted_trips(instruction)
    called = (_sum([inner(i) for i in c.instructions]) for c in entered(instruction))
    longest = max(called, key=lambda c: c.seconds, default=FREE)
    return replace(
        longest,
        seconds=count * longest.seconds,
        flops=count * longest.flops,
        bytes=count * longest.bytes,
        communication=count * longest.communication,
    )


def _sum(costs: list[Cost]) -> Cost:
    return Cost(
        sum(c.seconds for c in costs),
        sum(c.flops for c in costs),
        sum(c.bytes for c in costs),
        source=max((c.source for c in costs), key=lambda s: s.rank, default=Source.MEASURED),
        communication=sum(c.communication for c in costs),
    )


def _work_cost(work: Work, hardware: Hardware) -> Cost:
    if work.unit == "product":
        seconds = roofline.gemm_seconds(work.flops, work.bytes, hardware, work.bits)
    elif work.unit == "attention":
        seconds = roofline.attention_seconds(work.flops, work.bytes, hardware, work.executed)
    else:
        seconds = roofline.memory_seconds(work.bytes, hardware)
    return Cost(seconds, work.flops, work.bytes)
