"""The operator bases of DHelix (section 4.2, table 2; arXiv 2411.15871) as small JAX programs, compiled one by one.

An operator base is a kind of operator, such as a GEMM. The paper measures how two bases overlap. A Llama step contains
some of the bases, but not the bases of a mixture of experts. To test the paper's claims about pairs of bases (section
3.2, figure 4; see `overlap_findings`), this module makes each base a program of its own over a given mesh:

    compiled = compile_bases([*bases(LLAMA_8B), *bases(PHI_MOE)], mesh, local_axis="tp", options={...})
    module = compiled.modules["llama-8b attention-backward"]
    main_operator(base, module)                        # the one instruction that stands for the base

This module compiles the programs, but does not run them. `session` takes the operators out of the compiled modules and
measures them. The table shows the kernels that XLA makes for each base on H200 (jaxlib 0.11.2, without autotuning):

    table 2          base                  one kernel, unless more are named
    GEMM             gemm                  cuBLASLt call (or a Triton fusion, if autotuning prefers it)
    FlashAttention   attention             cuDNN call, causal, grouped queries
                     attention-backward    cuDNN call; the program holds the forward call too, for its residuals
    Group-GEMM       grouped-gemm          cuBLASLt call with a batch: experts filled to the same capacity
                     ragged-dot            masks to [rows, experts x hidden], then one cuBLASLt call: XLA has no
                                           grouped kernel here, so this does `experts` times the operations
    Fused BDA        residual-add          loop fusion; Llama has neither bias nor dropout
    Layernorm        norm                  Triton fusion; RMS norm of a shard of the sequence
    Router           router                four: cuBLASLt call, Triton softmax, sort fusion (the base), slices
    Permute          permute               gather fusion: a row of tokens for each of a token's experts
                     unpermute             reduce fusion that gathers: each token's rows weighted and summed
    (not named)      swiglu, rotary        loop fusions
    AllGather        all-gather            async pair; C1 of figure 4, inside a node
    ReduceScatter    reduce-scatter        async pair
    AlltoAll         all-to-all            async pair; C2 of figure 4, across nodes
    Send/Recv        send-recv             async pair of a collective-permute

Two measures keep the kernels realistic. First, the kernels of permute and unpermute compute the indices of the rows
that they move, as a permutation that scatters neighbours. Indices from an unfilled buffer would all name the same row,
so reads would hit the cache. Second, the program of each collective contains an independent GEMM, because XLA makes a
collective synchronous if there is no compute to overlap with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.runtime.compiler.lowering import compiled_module


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer and its parallelism.

    A layer without `experts` has the bases of a dense layer. A layer with `experts` has the bases of a mixture of
    experts instead.

    Attributes:
      ffn: hidden size of the feed-forward block of the dense layer, or of one expert.
      experts: number of experts on all GPUs together. They are spread over `expert_parallel` GPUs.
      top_k: number of experts per token.
      tensor_parallel: number of GPUs over which heads, ffn and (between blocks) the sequence are sharded. It should be
        the size of the mesh's local axis, because the sizes of shards follow from this number and not from the mesh.
      seq: tokens of a micro-batch.
    """

    name: str
    hidden: int
    ffn: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    experts: int = 0
    top_k: int = 2
    tensor_parallel: int = 4
    expert_parallel: int = 4
    seq: int = 8192

    @property
    def rows(self) -> int:
        """Number of rows that the experts of one GPU process. Each token counts once for each of its experts."""
        return self.seq * self.top_k


LLAMA_8B = LayerSizes("llama-8b", 4096, 14336)
LLAMA_25B = LayerSizes("llama-25b", 8192, 28672, heads=64)
"""The sizes of a layer of Llama-3.1-70B (DHelix table 3). Figure 4 uses this layer."""
PHI_MOE = LayerSizes("phi-moe", 4096, 6400, experts=16)
"""Sizes of DHelix table 5. Experts are spread over data-parallel GPUs, so each GPU has whole sequences (section 6.2.3).
"""

SIZES: Mapping[str, LayerSizes] = MappingProxyType({s.name: s for s in (LLAMA_8B, LLAMA_25B, PHI_MOE)})


@dataclass(frozen=True)
class OperatorBase:
    """One base at one size.

    Attributes:
      name: name of the base in the table of this file.
      sizes: sizes of the layer that contains the base.
      function: function of `arguments`; a communication base also takes the mesh axis as `axis=`.
      arguments: shapes of the arguments on one GPU.
      contains: marks that identify the main instruction. The main instruction has at least one of these marks. A mark
        is an opcode of the instruction or of an instruction that is fused into it, the target of a custom call, or the
        kind of a collective.
      axis: `local` for communication inside a node, `cross` for communication across nodes, empty for computation.
    """

    name: str
    sizes: LayerSizes
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    contains: tuple[str, ...]
    axis: str = ""

    def __str__(self) -> str:
        return f"{self.sizes.name} {self.name}"


@dataclass(frozen=True)
class CompiledBases:
    """The results of `compile_bases`; the keys of both maps are `str(base)`.

    Attributes:
      modules: the scheduled modules of bases that XLA could compile.
      failures: the reasons why other bases could not be compiled.
    """

    modules: Mapping[str, HloModule]
    failures: Mapping[str, str]


def bases(sizes: LayerSizes) -> tuple[OperatorBase, ...]:
    """Returns the bases of a dense layer, or the bases of a mixture of experts if the layer has experts."""
    return _expert_bases(sizes) if sizes.experts else _dense_bases(sizes)


def figure4_bases() -> dict[str, OperatorBase]:
    """The bases in the pairs of figure 4, by name.

    As the figure's caption says, C2 (the all-to-all) is a base of Phi-MoE. The others are bases of Llama 70B.
    """
    dense = {b.name: b for b in bases(LLAMA_25B)}
    names = ("gemm", "attention", "attention-backward", "all-gather")
    return {name: dense[name] for name in names} | {b.name: b for b in bases(PHI_MOE) if b.name == "all-to-all"}


def compile_bases(
    chosen: Iterable[OperatorBase],
    mesh: Mesh,
    local_axis: str,
    cross_axis: str | None = None,
    options: Mapping[str, str | int | bool] = MappingProxyType({}),
) -> CompiledBases:
    """Compiles each base for the devices of `mesh`, attached or deviceless.

    Args:
      chosen: bases to compile, see `bases`.
      mesh: any mesh. It determines the replica groups of collectives, but not the sizes of computation.
      local_axis: mesh axis along which GPUs share a node.
      cross_axis: mesh axis across nodes. The default is `local_axis`; then both kinds of communication use the same
        links.
      options: XLA options without leading dashes; for a deviceless mesh, `deviceless.COMPILER_OPTIONS`.

    Returns:
      For each base, a module or the reason why there is none. If a base cannot be compiled, the others still are.

    Raises:
      DhelixError: the mesh lacks one of the axes, or such an axis has one GPU only, so that no GPUs communicate.
    """
    axes = {"local": local_axis, "cross": cross_axis or local_axis}
    for axis in axes.values():
        if mesh.shape.get(axis, 0) < 2:
            raise DhelixError(
                f"mesh {dict(mesh.shape)} needs an axis {axis!r} of at least 2 GPUs, so that collectives communicate; "
                "name another axis"
            )
    modules, failures = {}, {}
    for base in chosen:
        try:
            lowered = _lower(base, mesh, axes.get(base.axis))
            modules[str(base)] = compiled_module(lowered.compile(dict(options)))
        except (RuntimeError, ValueError, NotImplementedError) as error:  # errors of JAX, XLA and cuDNN
            failures[str(base)] = str(error).strip().partition("\n")[0] or type(error).__name__
    return CompiledBases(modules, failures)


def main_operator(base: OperatorBase, module: HloModule) -> Instruction:
    """The instruction that stands for the compiled base. For a collective, it is the start of the async pair.

    Raises:
      DhelixError: there is no such instruction, because this version of XLA compiles the base to other instructions.
    """
    for instruction in module.schedule.get(module.entry, []):
        if _marks(instruction) & set(base.contains):
            return instruction
    raise DhelixError(f"{base} compiled without {' or '.join(base.contains)}: it cannot be told from other kernels")


def _lower(base: OperatorBase, mesh: Mesh, axis: str | None) -> jax.stages.Lowered:
    """Lowers the base's program. All GPUs have arguments of the same shapes, but the values may differ."""
    function = base.function if axis is None else functools.partial(base.function, axis=axis)

    def program(*arguments: jax.Array) -> Any:
        return function(*arguments)

    program.__name__ = f"{base.sizes.name} {base.name}".replace("-", "_").replace(" ", "_").replace(".", "_")
    mapped = jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    everywhere = NamedSharding(mesh, P())
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for a in base.arguments]
    return jax.jit(mapped).lower(*arguments)


def _marks(instruction: Instruction) -> set[str]:
    collective = find_collective(instruction)
    if collective is not None:
        return {collective.kind}
    inside = [i for called in instruction.called for i in called.instructions] if instruction.opcode == "fusion" else []
    found = {i.proto.custom_call_target if i.opcode == "custom-call" else i.opcode for i in (instruction, *inside)}
    return found - {"fusion"}


# The programs of the bases. All shapes are shapes on one GPU.

_PRODUCTS = ("__cublas$lt$matmul", "__cublas$gemm", "dot")


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _dense_bases(sizes: LayerSizes) -> tuple[OperatorBase, ...]:
    base = functools.partial(_base, sizes)
    seq, hidden, ffn = sizes.seq, sizes.hidden, sizes.ffn // sizes.tensor_parallel
    shard = _array(seq // sizes.tensor_parallel, hidden)
    query = _array(1, seq, sizes.heads // sizes.tensor_parallel, sizes.head_dim)
    key = _array(1, seq, sizes.kv_heads // sizes.tensor_parallel, sizes.head_dim)
    angle = _array(1, seq, 1, sizes.head_dim // 2, dtype=jnp.float32)
    weight = _array(hidden, dtype=jnp.float32)
    keys_and_values = _array(2, *key.shape)
    return (
        base("gemm", jnp.matmul, (_array(seq, hidden), _array(hidden, ffn)), _PRODUCTS),
        base("attention", _attention, (query, key, key), ("__cudnn$fmhaSoftmax",)),
        base("attention-backward", _attention_backward, (query, key, key, query), ("__cudnn$fmhaSoftmaxBackward",)),
        base("residual-add", jnp.add, (shard, shard), ("add",)),
        base("norm", _norm, (shard, weight), ("rsqrt",)),
        base("swiglu", _swiglu, (_array(seq, ffn), _array(seq, ffn)), ("multiply",)),
        base("rotary", _rotary, (query, angle, angle), ("concatenate",)),
        _communication(sizes, "all-gather", _all_gather, shard, "all-gather", "local"),
        _communication(sizes, "reduce-scatter", _reduce_scatter, _array(seq, hidden), "reduce-scatter", "local"),
        _communication(sizes, "send-recv", _send_recv, keys_and_values, "collective-permute", "cross"),
    )


def _expert_bases(sizes: LayerSizes) -> tuple[OperatorBase, ...]:
    base = functools.partial(_base, sizes)
    hidden, ffn, rows, experts = sizes.hidden, sizes.ffn, sizes.rows, sizes.experts // sizes.expert_parallel
    tokens, permuted = _array(sizes.seq, hidden), _array(rows, hidden)
    weights = _array(experts, hidden, ffn)
    counts = _array(experts, dtype=jnp.int32)
    permute = functools.partial(_permute, top_k=sizes.top_k)
    router = functools.partial(_router, top_k=sizes.top_k)
    gates = _array(sizes.seq, sizes.top_k, dtype=jnp.float32)
    return (
        base("grouped-gemm", jnp.matmul, (_array(experts, rows // experts, hidden), weights), _PRODUCTS),
        base("ragged-dot", lax.ragged_dot, (permuted, weights, counts), (*_PRODUCTS, "ragged-dot")),
        base("router", router, (tokens, _array(hidden, sizes.experts)), ("sort",)),
        base("permute", permute, (tokens,), ("gather",)),
        base("unpermute", _unpermute, (permuted, gates), ("gather",)),
        _communication(sizes, "all-to-all", _all_to_all, permuted, "all-to-all", "cross"),
    )


def _base(
    sizes: LayerSizes, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], contains: tuple[str, ...]
) -> OperatorBase:
    return OperatorBase(name, sizes, function, arguments, contains)


def _communication(
    sizes: LayerSizes, name: str, collective: Callable[..., Any], array: jax.ShapeDtypeStruct, kind: str, axis: str
) -> OperatorBase:
    """The base of a collective. Its program also contains an independent GEMM of two further arguments."""

    def beside_a_product(x: jax.Array, a: jax.Array, b: jax.Array, axis: str) -> Any:
        return collective(x, axis), a @ b

    product = (_array(sizes.seq, sizes.hidden), _array(sizes.hidden, sizes.hidden))
    return OperatorBase(name, sizes, beside_a_product, (array, *product), (kind,), axis)


def _attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def _attention_backward(query: jax.Array, key: jax.Array, value: jax.Array, gradient: jax.Array) -> Any:
    return jax.vjp(_attention, query, key, value)[1](gradient)


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale * weight).astype(x.dtype)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding: rotates each pair of elements, one from each half of the last dimension, by an angle."""
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def _router(tokens: jax.Array, weight: jax.Array, top_k: int) -> Any:
    logits = (tokens @ weight).astype(jnp.float32)
    return lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)


def _scattered_order(rows: int) -> jax.Array:
    """A permutation of row numbers that scatters neighbours (5003 is a prime). XLA fuses it into its user's kernel."""
    return lax.iota(jnp.int32, rows) * 5003 % rows


def _permute(tokens: jax.Array, top_k: int) -> jax.Array:
    """Copies of tokens in the order of experts: row r is a copy of token order[r] // top_k."""
    return tokens[_scattered_order(tokens.shape[0] * top_k) // top_k]


def _unpermute(rows: jax.Array, gates: jax.Array) -> jax.Array:
    """Outputs in the order of tokens. The output of a token is the sum of its rows, weighted by its gates."""
    back = rows[_scattered_order(rows.shape[0])].reshape(*gates.shape, rows.shape[1])
    return jnp.einsum("tkh,tk->th", back.astype(jnp.float32), gates).astype(rows.dtype)


def _all_gather(x: jax.Array, axis: str) -> jax.Array:
    return lax.all_gather(x, axis, tiled=True)


def _reduce_scatter(x: jax.Array, axis: str) -> jax.Array:
    return lax.psum_scatter(x, axis, tiled=True)


def _all_to_all(x: jax.Array, axis: str) -> jax.Array:
    return lax.all_to_all(x, axis, 0, 0, tiled=True)


def _send_recv(x: jax.Array, axis: str) -> jax.Array:
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(source, (source + 1) % size) for source in range(size)])
