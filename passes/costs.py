"""What each HLO instruction costs on a GPU, and on which lane it runs.

Scheduled GPU programs are what this is made for: GEMMs and attention are custom calls or Triton fusions,
elementwise work is fused, collectives are async pairs whose whole cost stands at the start. Lowered programs
get costs too, coarser ones: what XLA will fuse counts by what it writes, or nothing.

Every cost is the roofline's (`dhelix.profiles.roofline`), so a guess until profiles take its place.
"""

import enum
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dhelix.passes.collectives import find_collective, is_done
from dhelix.passes.hlo import Computation, Instruction, shapes
from dhelix.passes.hlo.loops import proved_trip_count
from dhelix.profiles import roofline
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
    """

    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    lane: Lane = Lane.COMPUTE


FREE = Cost(0.0)

_FREE = frozenset(
    """parameter constant get-tuple-element tuple bitcast after-all opt-barrier add-dependency
    partition-id replica-id domain async-update""".split()
)
# Not kernels of their own once XLA has fused.
_FUSED_AWAY = frozenset("broadcast reshape iota compare convert".split())
_SLICES = frozenset("dynamic-slice slice gather".split())


class Costs(dict[Instruction, Cost]):
    """Costs by instruction, computed when first asked for: `Costs(hardware)[instruction]`."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self.hardware = hardware

    def __missing__(self, instruction: Instruction) -> Cost:
        cost = self[instruction] = instruction_cost(instruction, self.hardware, self.__getitem__)
        return cost


def instruction_cost(
    instruction: Instruction, hardware: Hardware, inner: Callable[[Instruction], Cost] | None = None
) -> Cost:
    """Cost of `instruction`; `inner` gives costs of instructions inside what it calls, where they are
    known."""
    inner = inner or (lambda i: instruction_cost(i, hardware))
    opcode = instruction.opcode
    if opcode in _FREE or is_done(instruction):
        return FREE
    if opcode in ("while", "call", "conditional"):
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
    if opcode == "fusion":
        return _fusion_cost(instruction, hardware)
    if opcode == "dot":
        return _dot_cost(instruction, _touched(instruction), hardware)
    if opcode == "custom-call":
        return _custom_call_cost(instruction, hardware)
    if not instruction.computation.module.is_scheduled:
        moved = 0 if opcode in _FUSED_AWAY else shapes.byte_size(instruction.shape)
        return Cost(roofline.memory_seconds(moved, hardware) - hardware.kernel_seconds, 0.0, moved)
    return _memory_cost(_touched(instruction), hardware)


def trip_count(loop: Instruction) -> int | None:
    """How often the body of a `while` runs: as the compiler noted it, or proved from constants; else None."""
    known = _config(loop).get("known_trip_count")
    if known is not None:
        return int(known["n"])
    return proved_trip_count(loop)


def sequence_of(computation: Computation) -> list[Instruction]:
    """The order in which a computation runs: its schedule, or where it has none, as it stands."""
    return computation.module.schedule.get(computation, computation.instructions)


def _calls_cost(instruction: Instruction, inner: Callable[[Instruction], Cost]) -> Cost:
    """A loop's body times its trip count (once if unknown), a call's callee, the longest branch."""
    totals = []
    for called in instruction.called[:1] if instruction.opcode == "while" else instruction.called:
        costs = [inner(i) for i in called.instructions]
        totals.append(
            (sum(c.seconds for c in costs), sum(c.flops for c in costs), sum(c.bytes for c in costs))
        )
    count = (trip_count(instruction) or 1) if instruction.opcode == "while" else 1
    seconds, flops, moved = max(totals, default=(0.0, 0.0, 0.0))
    return Cost(count * seconds, count * flops, count * moved)


def _memory_cost(moved: float, hardware: Hardware) -> Cost:
    return Cost(roofline.memory_seconds(moved, hardware), 0.0, moved)


def _touched(instruction: Instruction) -> int:
    """Bytes of the result and of each operand; of what is sliced, only the slice."""
    if instruction.opcode in _SLICES:
        return 2 * shapes.byte_size(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * shapes.byte_size(instruction.operands[1].shape)
    operands = dict.fromkeys(instruction.operands)
    return shapes.byte_size(instruction.shape) + sum(shapes.byte_size(o.shape) for o in operands)


def _fusion_cost(fusion: Instruction, hardware: Hardware) -> Cost:
    """The product inside decides: a Triton GEMM, or a library call on slices; else the traffic."""
    fused = fusion.called[0]
    for inside in fused.instructions:
        if inside.opcode == "custom-call":
            return _custom_call_cost(inside, hardware)
        if inside.opcode == "dot":
            return _dot_cost(inside, _fusion_bytes(fused), hardware)
    return _memory_cost(_fusion_bytes(fused), hardware)


def _fusion_bytes(fused: Computation) -> int:
    """What a fused kernel reads and writes; a slice of a parameter or of the result counts as a slice."""
    users = fused.users()
    moved = sum(_read(p, users) for p in fused.instructions if p.opcode == "parameter")
    outputs = fused.root.operands if fused.root.opcode == "tuple" else [fused.root]
    return moved + sum(_written(o) for o in outputs)


def _read(value: Instruction, users: dict[Instruction, list[Instruction]]) -> int:
    """Bytes read of `value`: of its slices where it is only sliced, none where it is updated in place."""
    whole = shapes.byte_size(value.shape)
    total = 0
    for user in users[value]:
        if user.opcode in _SLICES and user.operands[0] is value:
            total += shapes.byte_size(user.shape)
        elif user.opcode in ("bitcast", "get-tuple-element"):
            total += _read(user, users)
        elif user.opcode not in ("dynamic-update-slice", "scatter") or user.operands[0] is not value:
            return whole
    return min(total, whole)


def _written(output: Instruction) -> int:
    while output.opcode in ("bitcast", "copy", "convert") and output.operands[0].opcode in (
        "bitcast",
        "dynamic-update-slice",
        "scatter",
    ):
        output = output.operands[0]
    if output.opcode == "dynamic-update-slice":
        return shapes.byte_size(output.operands[1].shape)
    if output.opcode == "scatter":
        return 2 * shapes.byte_size(output.operands[-1].shape)
    return shapes.byte_size(output.shape)


def _dot_cost(dot: Instruction, moved: float, hardware: Hardware) -> Cost:
    contracted = dot.proto.dot_dimension_numbers.lhs_contracting_dimensions
    lhs = dot.operands[0].shape
    flops = 2.0 * shapes.element_count(dot.shape) * math.prod(lhs.dimensions[d] for d in contracted)
    return Cost(roofline.gemm_seconds(flops, moved, hardware, _bits(lhs)), flops, moved)


def _custom_call_cost(call: Instruction, hardware: Hardware) -> Cost:
    target, config = call.proto.custom_call_target, _config(call)
    moved = _touched(call)
    result = call.shape.tuple_shapes[0] if shapes.is_tuple(call.shape) else call.shape
    if "gemm_backend_config" in config:
        moved = shapes.byte_size(result) + sum(shapes.byte_size(o.shape) for o in call.operands)
        lhs = call.operands[0].shape
        numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
        contracted = math.prod(lhs.dimensions[int(d)] for d in numbers["lhs_contracting_dimensions"])
        flops = 2.0 * shapes.element_count(result) * contracted
        return Cost(roofline.gemm_seconds(flops, moved, hardware, _bits(lhs)), flops, moved)
    if "cudnn_fmha_backend_config" in config:
        flops = _attention_flops(result, config["cudnn_fmha_backend_config"], "Backward" in target)
        return Cost(roofline.attention_seconds(flops, moved, hardware), flops, moved)
    return _memory_cost(moved, hardware)


def _attention_flops(result: Any, config: dict[str, Any], backward: bool) -> float:
    """Two products forward, five backward (the scores again); a causal mask leaves half of them."""
    batch, heads, queries, keys = (int(d) for d in config["intermediate_tensor_shape"]["dimensions"])
    head_size = shapes.element_count(result) // (batch * heads * queries)
    products = 5 if backward else 2
    masked = 0.5 if "CAUSAL" in config.get("mask_type", "") else 1.0
    return 2.0 * products * batch * heads * queries * keys * head_size * masked


def _bits(shape: Any) -> int:
    return max(8, 8 * shapes.byte_size(shape) // max(shapes.element_count(shape), 1))


def _config(instruction: Instruction) -> dict[str, Any]:
    return _parse(instruction.proto.backend_config)


@lru_cache(maxsize=4096)
def _parse(config: bytes) -> dict[str, Any]:
    """A `backend_config` that is a JSON object; anything else reads as empty."""
    try:
        found = json.loads(config) if config[:1] == b"{" else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
