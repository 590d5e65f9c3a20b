"""Families of custom calls: what the kernels of libraries compute, by the names of their targets.

A custom call is a name, operands and a result; what it computes is known of the names in `FAMILIES` alone. The first
row whose pattern matches the whole target counts:

    work                  how long it takes
    product               operations from the shapes, M N K of any layout
    attention             operations from the shapes of queries and keys; half of them where the call names a causal mask
    moves                 the bytes of its operands and of its result
    nothing               it says something to the compiler, or hands out memory
    unknown               likewise the bytes, for want of better: what it computes, nobody can see

Calls of cuBLASLt and of cuDNN's attention say more in their configuration, which `operator_work` and `operator_keys`
read. What no row matches is unknown, and `dhelix inspect` says how many of these a step runs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from dhelix.passes.analysis.collectives import is_exclusive
from dhelix.passes.hlo import Instruction, shapes

type WorkKind = Literal["product", "attention", "attention backward", "moves", "nothing", "unknown"]


@dataclass(frozen=True, slots=True)
class Family:
    """Custom calls that compute alike.

    Attributes:
      name: for people to read.
      work: how their time is estimated.
      pattern: of the whole target, without regard to case.
    """

    name: str
    work: WorkKind
    pattern: str


FAMILIES = (
    Family("attention backward", "attention backward", r"__cudnn\$fmha.*backward.*|te_fused_attn_backward.*"),
    Family("attention", "attention", r"__cudnn\$fmha.*|te_fused_attn(_forward.*)?"),
    Family("GEMM", "product", r"__cublas\$.*|__cudnn\$(gemm|.*scaled_?dot).*|__op\$block_scaled_dot|te_gemm.*"),
    Family("grouped GEMM", "moves", r"te_grouped_gemm.*"),  # how many rows a group has, the data say
    Family("convolution", "moves", r"__cudnn\$conv.*"),
    Family("normalization", "moves", r"__cudnn\$norm|te_(layer_?norm|rms_?norm|norm)_.*"),
    Family("softmax", "moves", r"te_scaled_.*softmax.*"),
    Family("activation", "moves", r"te_d?(act|gelu|silu|relu|swiglu|gated)_.*|te_d?bias_.*"),
    Family("cast", "moves", r"te_(cast|quantize|dbias_quantize|grouped_quantize|dequantize|transpose|swizzle|amax).*"),
    Family("sort", "moves", r"(__|xla\.gpu\.ext\.)?cub.*sort.*"),
    Family("prefix sum", "moves", r"(__|xla\.gpu\.ext\.)?cub.*scan.*"),
    Family("top-k", "moves", r".*top_?k.*"),
    Family("random numbers", "moves", r"(cu|hip)_threefry.*|.*rng_?bit_?generator.*"),
    Family("buffer", "nothing", r"(allocate|create)buffer|(un)?pin"),
    Family("annotation", "nothing", r"sharding|spmd(fulltoshard|shardtofull)shape|layoutconstraint|xla\.sdy\..*"),
    Family("transfer", "moves", r"moveto(host|device)|annotate_device_placement"),
    Family("Python callback", "unknown", r"xla_.*python.*callback"),
    Family("Triton kernel", "unknown", r".*triton.*"),
    Family("Mosaic GPU kernel", "unknown", r"mosaic_gpu.*"),
    Family("communication kernel", "unknown", r".*(nvshmem|nccl|te_.*comm).*"),
    Family("linear algebra", "unknown", r"(cu|hip)(solver|blas|sparse).*"),
)
UNKNOWN = Family("unknown kernel", "unknown", r".*")
_COLLECTIVE_MATMUL = Family("collective matmul", "product", "")

_CAUSAL = re.compile(r"mask_type\s*=\s*[2345]\b|mask_type[^,}]*causal", re.IGNORECASE)
"""In the attributes of a TransformerEngine attention: masks 2 to 5 are causal, with and without padding."""


def family_of(call: Instruction) -> Family:
    """The family of a custom call; UNKNOWN where no row of the table fits."""
    return _COLLECTIVE_MATMUL if is_exclusive(call) else _family(call.proto.custom_call_target)


@lru_cache(maxsize=1024)
def _family(target: str) -> Family:
    return next((f for f in FAMILIES if re.fullmatch(f.pattern, target, re.IGNORECASE)), UNKNOWN)


def calls_of(instruction: Instruction) -> list[Instruction]:
    """Custom calls of which an instruction is the kernel: itself, or what a fusion or an async pair holds."""
    if instruction.opcode == "custom-call":
        return [instruction]
    if instruction.opcode not in ("fusion", "async-start"):
        return []
    return [call for called in instruction.called for i in called.instructions for call in calls_of(i)]


def product_flops(call: Instruction) -> float:
    """Operations of a product, from its operands and its result, whatever their layouts: these have M K, K N and M N
    elements. 0 for what does not look like one."""
    matrices = _arrays(call)[:2]
    counts = [*map(shapes.element_count, matrices), shapes.element_count(_first(call.shape))]
    return 2.0 * math.sqrt(math.prod(counts)) if len(matrices) == 2 else 0.0


def attention_flops(call: Instruction, backward: bool) -> float:
    """Operations of an attention without a configuration of XLA's: two products forward, five backward.

    Shapes are TransformerEngine's: [batch, sequence, heads, head size] for queries, keys and values; keys and values, or
    all three, may be one array with a dimension of 2 or 3 behind the sequence. 0 for other shapes.
    """
    arrays = [a for a in _arrays(call) if len(a.dimensions) >= 4]
    if not arrays:
        return 0.0
    queries = list(arrays[0].dimensions)
    if len(queries) == 5:
        del queries[2]
    keys = arrays[1].dimensions[1] if len(arrays[0].dimensions) == 4 and len(arrays) > 1 else queries[1]
    left = 0.5 if _CAUSAL.search(call.proto.backend_config.decode(errors="replace")) else 1.0
    return 2.0 * (5 if backward else 2) * math.prod(queries) * keys * left


def _arrays(call: Instruction) -> list[Any]:
    """Shapes of the operands that are matrices or more, but not empty; scales and lengths are vectors."""
    return [o.shape for o in call.operands if len(o.shape.dimensions) >= 2 and shapes.element_count(o.shape)]


def _first(shape: Any) -> Any:
    return _first(shape.tuple_shapes[0]) if shapes.is_tuple(shape) and shape.tuple_shapes else shape
