"""Families of custom calls. The name of a call's target decides its family, which says what the call computes.

A custom call shows only a name, operands and a result. The table `FAMILIES` says what targets compute. The first row
whose pattern matches the whole target (and whose `config` is found in the configuration) decides how the time is
estimated:

    product               from operations, 2 M N K in any layout
    attention             from operations on queries and keys; half of them if the call names a causal mask
    convolution           from operations: each output element needs the part of the kernel for its output feature
    moves                 from the bytes of its operands and its result
    nothing               it informs the compiler or allocates memory, and takes no time
    unknown               from the bytes, too, because nothing says what it computes

cuBLASLt calls and cuDNN attention calls say more in their configuration, which `operator_work` and `operator_keys`
read. A call that matches no row is unknown; `dhelix inspect` says how many unknown calls a step runs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dhelix.passes.analysis.collectives import is_exclusive
from dhelix.passes.hlo import Instruction, shapes

type WorkKind = Literal["product", "attention", "attention backward", "convolution", "moves", "nothing", "unknown"]


@dataclass(frozen=True, slots=True)
class Family:
    """Custom calls whose time is estimated in the same way.

    Attributes:
      name: name for people to read.
      work: how the time of the calls is estimated.
      target: pattern for the whole target. Case does not count.
      config: pattern to find in the configuration; empty for any configuration.
      factors: numbers of the operands that a product multiplies.
    """

    name: str
    work: WorkKind
    target: str
    config: str = ""
    factors: tuple[int, int] = (0, 1)


FAMILIES = (
    Family("attention backward", "attention backward", r"__cudnn\$fmha.*backward.*|te_(\w+_)?fused_attn_.*backward.*"),
    Family("attention", "attention", r"__cudnn\$fmha.*|te_(\w+_)?fused_attn_.*"),
    Family("GEMM with communication", "unknown", r"te_gemm.*", r"collective_op\s*=\s*[1-9]"),
    Family("GEMM", "product", r"te_gemm.*", factors=(0, 2)),  # scales are between the factors
    Family("GEMM", "product", r"__cublas\$.*|__cudnn\$(gemm|.*scaled_?dot).*|__op\$block_scaled_dot"),
    Family("grouped GEMM", "moves", r"te_grouped_gemm.*"),  # the rows of a group depend on the data
    Family("convolution", "convolution", r"__cudnn\$conv.*"),
    Family("normalization", "moves", r"__cudnn\$norm|te_(layer|rms)?_?norm_.*"),
    Family("softmax", "moves", r"te_scaled_.*softmax.*"),
    Family("activation", "moves", r"te_d?(act|gelu|silu|relu|swiglu|gated)_?.*"),
    Family("cast", "moves", r"te_((grouped_|dbias_)?(de)?quantize|cast|transpose|swizzle|amax|rht_amax).*"),
    Family("sort", "moves", r"(__|xla\.gpu\.ext\.)?cub.*sort.*"),
    Family("prefix sum", "moves", r"(__|xla\.gpu\.ext\.)?cub.*scan.*"),
    Family("routing", "moves", r"(?!.*triton).*top_?k.*|te_fused_moe.*"),
    Family("random numbers", "moves", r"(cu|hip)_threefry.*|.*rng_?bit_?generator.*"),
    Family("buffer", "nothing", r"(allocate|create)buffer|(un)?pin"),
    Family("annotation", "nothing", r"sharding|spmd(fulltoshard|shardtofull)shape|layoutconstraint|xla\.sdy\..*"),
    Family("transfer", "moves", r"moveto(host|device)|annotate_device_placement"),
    Family("Python callback", "unknown", r"xla_.*python.*callback"),
    Family("Triton kernel", "unknown", r".*triton.*"),
    Family("Mosaic GPU kernel", "unknown", r"mosaic_gpu.*"),
    Family("communication kernel", "unknown", r".*(nvshmem|nccl|te_.*comm).*|te_ep_.*"),
    Family("linear algebra", "unknown", r"(cu|hip)(solver|blas|sparse).*"),
)
UNKNOWN = Family("unknown", "unknown", r".*")
_COLLECTIVE_MATMUL = Family("collective matmul", "product", "")

_CAUSAL = re.compile(r"mask_type\s*=\s*[2345]\b|mask_type[^,}]*causal", re.IGNORECASE)
"""Matches a causal mask in the attributes of a TransformerEngine attention. Mask types 2 to 5 are causal."""


def family_of(call: Instruction) -> Family:
    """The family of a custom call; UNKNOWN if no row of the table matches."""
    if is_exclusive(call):
        return _COLLECTIVE_MATMUL
    fitting = _families(call.proto.custom_call_target)
    return next(f for f in fitting if not f.config or re.search(f.config, _config(call)))


@lru_cache(maxsize=1024)
def _families(target: str) -> tuple[Family, ...]:
    """The rows whose target pattern matches, in order, then UNKNOWN. The configuration is not checked."""
    return *(f for f in FAMILIES if re.fullmatch(f.target, target, re.IGNORECASE)), UNKNOWN


def _config(call: Instruction) -> str:
    return call.proto.backend_config.decode(errors="replace")


def calls_of(instruction: Instruction) -> list[Instruction]:
    """The custom calls that an instruction runs: the instruction itself, or the calls in a fusion or an async pair."""
    if instruction.opcode == "custom-call":
        return [instruction]
    if instruction.opcode not in ("fusion", "async-start"):
        return []
    return [call for called in instruction.called for i in called.instructions for call in calls_of(i)]


def product_flops(call: Instruction) -> float:
    """Operations of a product in any layout, 2 M N K, from the element counts M K, K N and M N of its arrays.

    The result is 0 if the call has too few operands.
    """
    factors = family_of(call).factors
    if len(call.operands) <= max(factors):
        return 0.0
    sizes = (shapes.element_count(s) for s in (*(call.operands[n].shape for n in factors), shapes.first(call.shape)))
    return 2.0 * math.sqrt(math.prod(sizes))


def convolution_flops(call: Instruction) -> float:
    """Operations of a convolution. The derivatives with respect to input and kernel take the same number."""
    target, operands = call.proto.custom_call_target, [o.shape for o in call.operands]
    output, kernel = shapes.first(call.shape), operands[1]
    if "BackwardInput" in target:
        output = operands[0]
    elif "BackwardFilter" in target:
        output, kernel = operands[1], shapes.first(call.shape)
    features = kernel.dimensions[call.proto.convolution_dimension_numbers.kernel_output_feature_dimension]
    return 2.0 * shapes.element_count(output) * shapes.element_count(kernel) / max(features, 1)


def attention_flops(call: Instruction, backward: bool) -> float:
    """Operations of an attention call that has no configuration from XLA: two products forward, five backward.

    Queries, keys and values have TransformerEngine's shape [batch, sequence, heads, head size]. Keys and values, or all
    three, may be one array with a dimension of 2 or 3 after the sequence. The result is 0 if no operand has at least
    four dimensions.
    """
    arrays = [o.shape for o in call.operands if len(o.shape.dimensions) >= 4]
    if not arrays:
        return 0.0
    queries = list(arrays[0].dimensions)
    if len(queries) == 5:
        del queries[2]
    keys = arrays[1].dimensions[1] if len(arrays[0].dimensions) == 4 and len(arrays) > 1 else queries[1]
    left = 0.5 if _CAUSAL.search(_config(call)) else 1.0
    return 2.0 * (5 if backward else 2) * math.prod(queries) * keys * left
