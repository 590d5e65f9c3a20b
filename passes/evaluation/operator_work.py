"""Counts the floating-point operations and device-memory bytes of one HLO instruction from its shapes.

A GPU program consists of matrix products (cuBLAS and cuDNN custom calls, Triton fusions), attention custom calls, and
other instructions. The other instructions count as memory traffic. Custom calls count by their family (`custom_calls`).
Of a buffer that is only sliced, only the slice counts. Of a buffer that is updated in place, only the update counts.
The workspace of a library call does not count. Both `roofline_costs` and the keys of profiles (`operator_keys`) use
these counts.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from dhelix.passes.analysis.collectives import is_exclusive
from dhelix.passes.analysis.configuration import backend_config
from dhelix.passes.evaluation.custom_calls import attention_flops, convolution_flops, family_of, product_flops
from dhelix.passes.hlo import Computation, Instruction, shapes
from dhelix.profiles.estimates import roofline

SLICES = frozenset("dynamic-slice slice gather".split())


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one execution.

    Attributes:
      bytes: bytes read and written.
      unit: what bounds the time: operations or memory (`product`, `attention`), or memory alone (`memory`).
      bits: width of the elements of a product's inputs.
      executed: operations of attention that are executed for each one in `flops` (`roofline.executed`).
    """

    flops: float
    bytes: int
    unit: Literal["product", "attention", "memory"] = "memory"
    bits: int = 16
    executed: float = 1.0


def work_of(instruction: Instruction) -> Work:
    """Work of an instruction that calls at most a fused computation. Does not handle collectives."""
    if instruction.opcode == "fusion":
        return _fusion_work(instruction.called[0])
    if instruction.opcode == "dot":
        return _dot_work(instruction, touched_bytes(instruction))
    if instruction.opcode == "custom-call":
        return _custom_call_work(instruction)
    return Work(0.0, touched_bytes(instruction))


def touched_bytes(instruction: Instruction) -> int:
    """Bytes of the result and of each distinct operand. For a slice or an update in place: twice the part's bytes."""
    if instruction.opcode in SLICES:
        return 2 * shapes.byte_size(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * shapes.byte_size(instruction.operands[1].shape)
    operands = dict.fromkeys(instruction.operands)
    return shapes.byte_size(instruction.shape) + sum(shapes.byte_size(o.shape) for o in operands)


def payload(fused: Computation) -> Instruction | None:
    """The library call or matrix product that decides the cost of a fused computation; None if there is none."""
    for inside in fused.instructions:
        if inside.opcode in ("custom-call", "dot"):
            return inside
        if inside.opcode == "fusion" and (found := payload(inside.called[0])):
            return found
    return None


def _fusion_work(fused: Computation) -> Work:
    """Work of the product or library call in a fusion (a Triton GEMM, or a call on slices), else the memory traffic."""
    inside = payload(fused)
    if inside is None:
        return Work(0.0, fusion_bytes(fused))
    return _custom_call_work(inside) if inside.opcode == "custom-call" else _dot_work(inside, fusion_bytes(fused))


def fusion_bytes(fused: Computation) -> int:
    """Bytes that a fused kernel reads and writes. Of a sliced parameter or result, only the slice counts."""
    users = fused.users()
    moved = sum(read_bytes(p, users) for p in fused.instructions if p.opcode == "parameter")
    outputs = fused.root.operands if fused.root.opcode == "tuple" else [fused.root]
    return moved + sum(written_bytes(o) for o in outputs)


def read_bytes(value: Instruction, users: dict[Instruction, list[Instruction]]) -> int:
    """Bytes that are read from `value`: only the slices if it is only sliced, none if it is updated in place."""
    whole = shapes.byte_size(value.shape)
    total = 0
    for user in users[value]:
        if user.opcode in SLICES and user.operands[0] is value:
            total += shapes.byte_size(user.shape)
        elif user.opcode in ("bitcast", "get-tuple-element"):
            total += read_bytes(user, users)
        elif user.opcode not in ("dynamic-update-slice", "scatter") or user.operands[0] is not value:
            return whole
    return min(total, whole)


def written_bytes(output: Instruction) -> int:
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


def _dot_work(dot: Instruction, moved: int) -> Work:
    contracted = dot.proto.dot_dimension_numbers.lhs_contracting_dimensions
    lhs = dot.operands[0].shape
    flops = 2.0 * shapes.element_count(dot.shape) * math.prod(lhs.dimensions[d] for d in contracted)
    return Work(flops, moved, "product", _bits(lhs))


def _custom_call_work(call: Instruction) -> Work:
    target, config = call.proto.custom_call_target, backend_config(call)
    result = shapes.first(call.shape)  # the last one is a workspace
    operands = [shapes.byte_size(o.shape) for o in call.operands]
    if gemm := config.get("grouped_gemm_backend_config", config).get("gemm_backend_config"):
        lhs = call.operands[0].shape
        contracted = gemm["dot_dimension_numbers"]["lhs_contracting_dimensions"]
        depth = math.prod(lhs.dimensions[int(d)] for d in contracted)
        flops = 2.0 * shapes.element_count(result) * depth
        if "grouped_gemm_backend_config" in config and len(result.dimensions) > len(lhs.dimensions):
            flops /= result.dimensions[0]  # each group contracts only its share of the rows
        return Work(flops, shapes.byte_size(result) + sum(operands), "product", _bits(lhs))
    if is_exclusive(call):
        return _collective_matmul_work(call, result)
    if attention := config.get("cudnn_fmha_backend_config"):
        flops = _attention_flops(result, attention, "Backward" in target)
        skips = not ("CAUSAL" in attention.get("mask_type", "") and "Bias" in target)
        executed = roofline.executed(result.dimensions[-1], skips)
        return Work(flops, touched_bytes(call), "attention", executed=executed)
    return _family_work(call)


def _family_work(call: Instruction) -> Work:
    """Work of a call by the family of its target. Only shapes are used, because no configuration says more."""
    work, moved = family_of(call).work, touched_bytes(call)
    if work == "product":
        return Work(product_flops(call), moved, "product", _bits(call.operands[0].shape))
    if work == "convolution" and len(call.operands) > 1 and call.operands[1].shape.dimensions:
        return Work(convolution_flops(call), moved, "product", _bits(call.operands[0].shape))
    if work in ("attention", "attention backward"):
        return Work(attention_flops(call, work == "attention backward"), moved, "attention")
    return Work(0.0, 0 if work == "nothing" else moved)


def _collective_matmul_work(call: Instruction, result: Any) -> Work:
    """Work of the product in a kernel that multiplies while it communicates.

    The number of rows is the number before a reduce-scatter or after an all-gather. The communication does not count.
    The kernel's other results hold parts from its peers, and do not count either.
    """
    matrices = [o.shape for o in call.operands if len(o.shape.dimensions) == 2]
    moved = sum(map(shapes.byte_size, matrices)) + shapes.byte_size(result)
    if len(matrices) < 2 or matrices[0].dimensions[1] != matrices[1].dimensions[0]:
        return Work(0.0, moved)
    (rows, depth), (_, columns) = matrices[0].dimensions, matrices[1].dimensions
    rows = max(rows, result.dimensions[0])
    return Work(2.0 * rows * depth * columns, moved, "product", _bits(matrices[0]))


def _attention_flops(result: Any, config: dict[str, Any], backward: bool) -> float:
    """Operations of attention: two products forward, five backward. A causal mask halves the number.

    The backward pass computes the scores again.
    """
    batch, heads, queries, keys = (int(d) for d in config["intermediate_tensor_shape"]["dimensions"])
    head_size = shapes.element_count(result) // (batch * heads * queries)
    products = 5 if backward else 2
    masked = 0.5 if "CAUSAL" in config.get("mask_type", "") else 1.0
    return 2.0 * products * batch * heads * queries * keys * head_size * masked


def _bits(shape: Any) -> int:
    return max(8, 8 * shapes.byte_size(shape) // max(shapes.element_count(shape), 1))
