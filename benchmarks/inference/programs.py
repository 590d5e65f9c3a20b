"""Programs for timing: a stack of Llama layers in inference, and its operands.

    prefill, 1 x 4096     layers, x [1, 4096, hidden]            -> x, keys and values of 4096 tokens
    decode, 64 x 4096     layers, x [64, 1, hidden], 64 caches   -> x, the caches with one token more

Each layer has its own arrays, as in a serving engine. In a loop over stacked layers, XLA would copy weights out of the
stack if a custom kernel or several matmuls read them. These copies would dominate decode. Caches are donated and
written in place. Every call writes the same token, so all calls and variants do the same work.

A layer has two row-parallel matmuls: the outputs of attention and of the feed-forward. Variants differ in how the
products are summed over devices:

    xla                  the matmul, then NCCL's all-reduce
    tile_all_reduce      the matmul, then the tile-wise all-reduce, without overlap, as DistFuse measures it in vLLM
    a form's key         that form of `matmul_all_reduce`
    no communication     only the matmul: the bound, with wrong results. A barrier keeps XLA from fusing the addition
                         of the residual stream into the matmul, because the other variants cannot fuse it
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
from dhelix.models.llama import model as llama
from dhelix.models.llama.inference import Cache, cache_shapes, cache_specs, decode_layers, prefill_layers
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
    """

    kind: Literal["prefill", "decode"]
    batch: int
    tokens: int

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
    others = {TILE_WISE: TileWise, BOUND: WithoutCommunication}
    return TensorParallel(collective_matmuls=others[variant]() if variant in others else CollectiveMatmuls(variant))


def config_for(config: LlamaConfig, mesh: Mesh) -> LlamaConfig:
    """`config` with separate arrays for each layer, and the implementation of attention for the mesh's devices."""
    platform = mesh.devices.flat[0].platform
    return dataclasses.replace(config, scan_layers=False, attention=resolve_attention(config, platform))


def program(config: LlamaConfig, mesh: Mesh, case: Case, variant: str) -> Callable[..., tuple[jax.Array, Any]]:
    """The jitted function of a case: (layers, x) -> (x, caches); for decode (layers, x, donated caches, length)."""
    parallel = parallel_of(variant)
    layers, cached = llama.param_specs(config)["layers"], cache_specs(config).layers

    def prefill(layers: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        x, cache = prefill_layers(config, layers, x, case.capacity, parallel)
        return x, cache.layers

    def decode(layers: Any, x: jax.Array, cached: Any, length: jax.Array) -> tuple[jax.Array, Any]:
        x, cache = decode_layers(config, layers, x, Cache(cached, length), parallel)
        return x, cache.layers

    on_each = functools.partial(jax.shard_map, mesh=mesh, out_specs=(P(), cached), check_vma=False)
    if case.kind == "prefill":
        return jax.jit(on_each(prefill, in_specs=(layers, P())))
    return jax.jit(on_each(decode, in_specs=(layers, P(), cached, P())), donate_argnums=2)


def lowered(config: LlamaConfig, mesh: Mesh, case: Case, variant: str) -> jax.stages.Lowered:
    """`program`, lowered for the shapes of a case."""
    shapes = [_layer_shapes(config)] * config.layers, _x_shape(config, case), *_cache_shapes(config, case)
    operands = jax.tree.map(_placed, shapes, _shardings(config, mesh, case))
    return program(config, mesh, case, variant).lower(*operands)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """XLA options of all variants."""
    return {} if mesh.devices.flat[0].platform == "cpu" else _OPTIONS


def make_layers(config: LlamaConfig, mesh: Mesh) -> list[dict[str, jax.Array]]:
    """Weights of all layers: ones for norms, else normally distributed so that outputs have a deviation near 1."""
    shapes = _layer_shapes(config)
    depths = {"wo": config.heads * config.head_dim, "w_down": config.ffn}

    def make(key: jax.Array) -> dict[str, jax.Array]:
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {
            name: jnp.ones(shape.shape, shape.dtype)
            if name.endswith("norm")
            else _normal(keys[name], shape, depths.get(name, config.hidden) ** -0.5)
            for name, shape in shapes.items()
        }

    specs = llama.param_specs(config)["layers"][0]
    made = jax.jit(make, out_shardings={name: NamedSharding(mesh, spec) for name, spec in specs.items()})
    return [made(key) for key in jax.random.split(jax.random.key(0), config.layers)]


def make_inputs(config: LlamaConfig, mesh: Mesh, case: Case) -> tuple[Any, ...]:
    """The other arguments of `program`: x; for decode also random keys and values, and the number of cached tokens."""
    shapes = [_x_shape(config, case), *_cache_shapes(config, case)[:1]]
    leaves, structure = jax.tree.flatten(shapes)

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(leaves))
        made = [_normal(key, shape) for key, shape in zip(keys, leaves, strict=True)]
        length = (jnp.int32(case.tokens),) if case.kind == "decode" else ()
        return *jax.tree.unflatten(structure, made), *length

    return jax.jit(make, out_shardings=_shardings(config, mesh, case)[1:])(jax.random.key(1))


def _normal(key: jax.Array, shape: jax.ShapeDtypeStruct, deviation: float = 1.0) -> jax.Array:
    return (deviation * jax.random.normal(key, shape.shape, jnp.float32)).astype(shape.dtype)


def _layer_shapes(config: LlamaConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one layer's weights, in the compute dtype."""
    params = jax.eval_shape(functools.partial(llama.init_params, config), jax.random.key(0))
    return {name: jax.ShapeDtypeStruct(w.shape, jnp.dtype(config.dtype)) for name, w in params["layers"][0].items()}


def _x_shape(config: LlamaConfig, case: Case) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((case.batch, case.new, config.hidden), jnp.dtype(config.dtype))


def _cache_shapes(config: LlamaConfig, case: Case) -> tuple[Any, ...]:
    return cache_shapes(config, case.batch, case.capacity) if case.kind == "decode" else ()


def _shardings(config: LlamaConfig, mesh: Mesh, case: Case) -> tuple[Any, ...]:
    """Shardings of `program`'s arguments."""
    cached = cache_specs(config) if case.kind == "decode" else ()
    specs = llama.param_specs(config)["layers"], P(), *cached
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P))


def _placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
