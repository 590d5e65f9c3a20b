"""Collective matmuls and the equivalent plain expressions, on sharded operands with global shapes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from dhelix.runtime.collective_matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

FORMS = ("monolithic", "ring", "bidirectional_ring", "hybrid")

# The tests compare values, so LLVM's optimizations would only cost time.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

COLLECTIVE: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce": matmul_all_reduce,
}


def plain(kind: str, x: jax.Array, w: jax.Array, axis: Any) -> jax.Array:
    rows = x.ndim - 2
    if kind == "all_gather_matmul":
        return lax.all_gather(x, axis, axis=rows, tiled=True) @ w
    if kind == "matmul_reduce_scatter":
        return lax.psum_scatter(x @ w, axis, scatter_dimension=rows, tiled=True)
    return lax.psum(x @ w, axis)


def specs(
    kind: str, batch: tuple[Any, ...] = (), axis: Any = "tp"
) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Specs of x, w and the result; `batch` shards the batch dimensions."""
    P = PartitionSpec
    if kind == "all_gather_matmul":
        return P(*batch, axis), P(None, axis), P(*batch, None, axis)
    return P(*batch, None, axis), P(axis), P(*batch, axis if kind == "matmul_reduce_scatter" else None)


def mesh(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    grid = np.array(jax.devices()[:count]).reshape(*axes.values())
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def with_gradients(f: Callable[..., Any], kind: str, on: Mesh, batch: tuple[Any, ...], vma: bool = True) -> Any:
    """Jits `f(x, w)` and its derivatives under `shard_map`: (x, w, cotangent) -> result, cotangents of x and w."""
    spec_x, spec_w, spec_y = specs(kind, batch)

    def local(x: jax.Array, w: Any, cotangent: jax.Array) -> Any:
        y, pullback = jax.vjp(f, x, w)
        return y, *pullback(cotangent)

    ins, outs = (spec_x, spec_w, spec_y), (spec_y, spec_x, spec_w)
    return fast_jit(jax.shard_map(local, mesh=on, in_specs=ins, out_specs=outs, check_vma=vma))


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Compares each array to `tolerance` of its largest magnitude."""

    def compare(a: Any, b: Any) -> None:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(initial=0), 1e-30))

    jax.tree.map(compare, actual, expected)
