"""Programs for timing: a stack of Llama layers or a whole model in inference, and its operands.

    prefill, 1 x 4096     layers, x [1, 4096, hidden]            -> x, keys and values of 4096 tokens
    decode, 64 x 4096     layers, x [64, 1, hidden], 64 caches   -> x, the caches with one token more
    whole, prefill        parameters, tokens [1, 4096]           -> (logits, next tokens), keys and values
    whole, decode         parameters, tokens [64], 64 caches     -> (logits, next tokens), caches

A whole model has a column-parallel embedding and output, each with an all-gather behind it. Every device has the logits
of the whole vocabulary, and takes the token with the largest one.

Each layer has its own arrays, as in a serving engine. In a loop over stacked layers, XLA would copy weights out of the
stack if a custom kernel or several matmuls read them. These copies would dominate decode. Caches are donated and
written in place. Every call writes the same token, so all calls and variants do the same work.

A layer has two row-parallel matmuls: the outputs of attention and of the feed-forward. Variants differ in how the
products are summed over devices:

    xla                  the matmul, then NCCL's all-reduce
    tile_all_reduce      the matmul, then the tile-wise all-reduce, without overlap, as DistFuse measures it in vLLM
    a form's key         that form of `matmul_all_reduce`
    no communication     only the matmul: the bound, with wrong results. A barrier keeps XLA from fusing the addition
                         of the residual stream into the matmul, because the other variants cannot fuse it. Instead
                         of all-gathers, a device repeats its own columns
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.benchmarks.inference.results import BOUND, TILE_WISE, XLA
from dhelix.benchmarks.inference.tile_all_reduce import tile_all_reduce
from dhelix.errors import DhelixError
from dhelix.models import LlamaConfig
from dhelix.models.common.layers import resolve_attention
from dhelix.models.common.parallel import TensorParallel
from dhelix.models.llama import inference
from dhelix.models.llama import model as llama
from dhelix.models.llama.inference import Cache, cache_shapes, cache_specs
from dhelix.runtime.collective_matmul import CollectiveMatmuls
from dhelix.runtime.collective_matmul.products import matmul
from dhelix.runtime.processes.launch_settings import link_of

_ROOM = 128  # free places in a cache: for the new token, and to make the capacity a multiple of tiles
_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,  # cuBLAS computes all products, as in `collective_matmul/run.py`
    "xla_gpu_dot_merger_threshold_mb": 0,  # else each call copies the weights of q, k and v into one array
}


@dataclass(frozen=True)
class Case:
    """The work of one call.

    Attributes:
      batch: number of sequences.
      tokens: tokens of each prompt (prefill), or cached tokens of each sequence (decode).
      whole: whether embedding, output and the choice of the next token belong to the work, beside the layers.
    """

    kind: Literal["prefill", "decode"]
    batch: int
    tokens: int
    whole: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.batch} x {self.tokens}"

    @property
    def new(self) -> int:
        """Number of tokens of each sequence that the layers compute."""
        return self.tokens if self.kind == "prefill" else 1

    @property
    def capacity(self) -> int:
        return self.tokens + (0 if self.kind == "prefill" else _ROOM)


class WithoutCommunication(CollectiveMatmuls):
    """Row-parallel matmuls that do not sum their partial results."""

    def matmul_all_reduce(self, x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
        return lax.optimization_barrier(matmul(x, w))


class WithoutGathers(TensorParallel):
    """Exchanges in which a device repeats its own columns in place of the other devices' columns."""

    def gather_features(self, x: jax.Array) -> jax.Array:
        return lax.optimization_barrier(jnp.tile(x, (1, 1, self.sequence_shards())))


class TileWise(CollectiveMatmuls):
    """Row-parallel matmuls, followed by an all-reduce through peer memory."""

    def matmul_all_reduce(self, x: jax.Array, w: jax.Array, axis_name: Any) -> jax.Array:
        if link_of(os.environ) != "nvlink":
            raise DhelixError(f"{TILE_WISE} needs peer-to-peer access, and NCCL_P2P_DISABLE is set: leave it out")
        return tile_all_reduce(matmul(x, w), axis_name)


def parallel_of(variant: str) -> TensorParallel:
    """The exchanges between devices in a variant (see the module's docstring)."""
    if variant == XLA:
        return TensorParallel()
    if variant == BOUND:
        return WithoutGathers(collective_matmuls=WithoutCommunication())
    return TensorParallel(collective_matmuls=TileWise() if variant == TILE_WISE else CollectiveMatmuls(variant))


def config_for(config: LlamaConfig, mesh: Mesh) -> LlamaConfig:
    """`config` with separate arrays for each layer, and the implementation of attention for the mesh's devices."""
    platform = mesh.devices.flat[0].platform
    return dataclasses.replace(config, scan_layers=False, attention=resolve_attention(config, platform))


def program(config: LlamaConfig, mesh: Mesh, case: Case, variant: str) -> Any:
    """The jitted function of a case: (weights, x) -> (result, caches); for decode (weights, x, donated caches, length).

    The result is x after all layers. For a whole model, x are tokens, and the result is (logits, next tokens).
    """
    parallel = parallel_of(variant)
    weights, cached = _weight_specs(config, case.whole), cache_specs(config).layers
    start: Callable[..., Any] = inference.prefill_layers
    go_on: Callable[..., Any] = inference.decode_layers
    if case.whole:
        start = functools.partial(inference.prefill, whole_logits=True)
        go_on = functools.partial(inference.decode, whole_logits=True)

    def result(found: jax.Array) -> Any:
        return (found, jnp.argmax(found, axis=-1)) if case.whole else found

    def prefill(weights: Any, x: jax.Array) -> tuple[Any, Any]:
        found, cache = start(config, weights, x, case.capacity, parallel)
        return result(found), cache.layers

    def decode(weights: Any, x: jax.Array, cached: Any, length: jax.Array) -> tuple[Any, Any]:
        found, cache = go_on(config, weights, x, Cache(cached, length), parallel)
        return result(found), cache.layers

    on_each = functools.partial(jax.shard_map, mesh=mesh, out_specs=(P(), cached), check_vma=False)
    if case.kind == "prefill":
        return jax.jit(on_each(prefill, in_specs=(weights, P())))
    return jax.jit(on_each(decode, in_specs=(weights, P(), cached, P())), donate_argnums=2)


def lowered(config: LlamaConfig, mesh: Mesh, case: Case, variant: str) -> jax.stages.Lowered:
    """`program`, lowered for the shapes of a case."""
    shapes = _weight_shapes(config, case.whole), _x_shape(config, case), *_cache_shapes(config, case)
    operands = jax.tree.map(_placed, shapes, _shardings(config, mesh, case))
    return program(config, mesh, case, variant).lower(*operands)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """XLA options of all variants."""
    return {} if mesh.devices.flat[0].platform == "cpu" else _OPTIONS


def make_weights(config: LlamaConfig, mesh: Mesh, whole: bool = False) -> Any:
    """The first argument of `program`: the weights of all layers, or all parameters of a whole model.

    Norms are ones. Others are normally distributed so that outputs have a deviation near 1.
    """
    shapes, specs = _params_shapes(config), _weight_specs(config, whole=True)
    make = _maker(config, mesh, shapes["layers"][0], specs["layers"][0])
    layers = [make(key) for key in jax.random.split(jax.random.key(0), config.layers)]
    if not whole:
        return layers
    ends = {name: shape for name, shape in shapes.items() if name != "layers"}
    made = _maker(config, mesh, ends, {name: specs[name] for name in ends})(jax.random.key(2))
    return {**made, "layers": layers}


def _maker(config: LlamaConfig, mesh: Mesh, shapes: Any, specs: Any) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """A function from a key to weights of the given shapes, split over the mesh as `specs` says."""
    depths = {"wo": config.heads * config.head_dim, "w_down": config.ffn, "embedding": 1}

    def make(key: jax.Array) -> dict[str, jax.Array]:
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {
            name: jnp.ones(shape.shape, shape.dtype)
            if name.endswith("norm")
            else _normal(keys[name], shape, depths.get(name, config.hidden) ** -0.5)
            for name, shape in shapes.items()
        }

    return jax.jit(make, out_shardings={name: NamedSharding(mesh, spec) for name, spec in specs.items()})


def make_inputs(config: LlamaConfig, mesh: Mesh, case: Case) -> tuple[Any, ...]:
    """The other arguments of `program`: x or tokens; for decode also keys, values, and the number of cached tokens."""
    shapes = [_x_shape(config, case), *_cache_shapes(config, case)[:1]]
    leaves, structure = jax.tree.flatten(shapes)

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(leaves))
        made = [_random(config, key, shape) for key, shape in zip(keys, leaves, strict=True)]
        length = (jnp.int32(case.tokens),) if case.kind == "decode" else ()
        return *jax.tree.unflatten(structure, made), *length

    return jax.jit(make, out_shardings=_shardings(config, mesh, case)[1:])(jax.random.key(1))


def _random(config: LlamaConfig, key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jax.random.randint(key, shape.shape, 0, config.vocab, shape.dtype)
    return _normal(key, shape)


def _normal(key: jax.Array, shape: jax.ShapeDtypeStruct, deviation: float = 1.0) -> jax.Array:
    return (deviation * jax.random.normal(key, shape.shape, jnp.float32)).astype(shape.dtype)


def _params_shapes(config: LlamaConfig) -> Any:
    """Shapes of all parameters, in the compute dtype."""
    params = jax.eval_shape(functools.partial(llama.init_params, config), jax.random.key(0))
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.dtype(config.dtype)), params)


def _weight_shapes(config: LlamaConfig, whole: bool) -> Any:
    shapes = _params_shapes(config)
    return shapes if whole else shapes["layers"]


def _weight_specs(config: LlamaConfig, whole: bool) -> Any:
    return inference.column_embedding_specs(config) if whole else llama.param_specs(config)["layers"]


def _x_shape(config: LlamaConfig, case: Case) -> jax.ShapeDtypeStruct:
    if case.whole:
        return jax.ShapeDtypeStruct((case.batch, case.new) if case.kind == "prefill" else (case.batch,), jnp.int32)
    return jax.ShapeDtypeStruct((case.batch, case.new, config.hidden), jnp.dtype(config.dtype))


def _cache_shapes(config: LlamaConfig, case: Case) -> tuple[Any, ...]:
    return cache_shapes(config, case.batch, case.capacity) if case.kind == "decode" else ()


def _shardings(config: LlamaConfig, mesh: Mesh, case: Case) -> tuple[Any, ...]:
    """Shardings of `program`'s arguments."""
    cached = cache_specs(config) if case.kind == "decode" else ()
    specs = _weight_specs(config, case.whole), P(), *cached
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P))


def _placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
