"""Collective matmuls in a form that is known to be possible, with one weight or several that share the collective.

All but the monolithic form multiply with the weights side by side, made once, and split the result.
"""

from collections.abc import Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax

from dhelix.profiles.collective_matmul import Form
from dhelix.runtime.collective_matmul import hybrid, monolithic, mosaic, ring
from dhelix.runtime.collective_matmul.monolithic import AxisName
from dhelix.runtime.collective_matmul.products import columns_of, matmul, row_product

_DIRECTIONS = {"ring": ring.RING, "bidirectional_ring": ring.BIDIRECTIONAL}
Arrays = tuple[jax.Array, ...]


def all_gather_matmul(
    form: Form, x: jax.Array, weights: Arrays, axis_name: AxisName, transposed: bool = False
) -> tuple[Arrays, jax.Array]:
    """Gathered `x` times each of `weights`; and gathered `x`."""
    if form.name == "monolithic" or not isinstance(axis_name, str):
        gathered = monolithic.all_gather(x, axis_name)
        return tuple(matmul(gathered, w, transposed) for w in weights), gathered
    w = _joined(weights, axis=0 if transposed else 1)
    if form.name == "mosaic":
        out, gathered = mosaic.all_gather_matmul(x, w, axis_name, form.tiles, transposed)
    elif form.name == "hybrid":
        out, gathered = hybrid.all_gather_matmul(x, w, axis_name, form.chunks, transposed)
    else:
        out, gathered = ring.all_gather_matmul(x, w, axis_name, _DIRECTIONS[form.name], transposed)
    return _split(out, [columns_of(w, transposed) for w in weights]), gathered


def matmul_reduce_scatter(
    form: Form, xs: Arrays, weights: Arrays, axis_name: AxisName, transposed: bool = False
) -> jax.Array:
    """The sum over devices of each of `xs` times its weight, scattered over rows."""
    if form.name == "monolithic" or not isinstance(axis_name, str):
        return monolithic.reduce_scatter(monolithic.sum_of_products(xs, weights, transposed), axis_name)
    x, w = _joined(xs, axis=-1), _joined(weights, axis=1 if transposed else 0)
    if form.name == "mosaic":
        return mosaic.matmul_reduce_scatter(x, w, axis_name, form.tiles, transposed)
    if form.name == "hybrid":
        return hybrid.matmul_reduce_scatter(x, w, axis_name, form.chunks, transposed)
    return ring.matmul_reduce_scatter(x, w, axis_name, _DIRECTIONS[form.name], transposed)


def matmul_all_reduce(form: Form, x: jax.Array, w: jax.Array, axis_name: AxisName) -> jax.Array:
    """The sum over devices of `x` times `w`."""
    if form.name == "monolithic" or not isinstance(axis_name, str):
        return lax.psum(matmul(x, w), axis_name)
    if form.name == "mosaic":
        return mosaic.matmul_all_reduce(x, w, axis_name, form.tiles)
    if form.name == "hybrid":
        return hybrid.matmul_all_reduce(x, w, axis_name, form.chunks)
    return ring.matmul_all_reduce(x, w, axis_name, _DIRECTIONS[form.name])


def gathered_gradients(
    form: Form, x: jax.Array, weights: Arrays, cotangents: Arrays, axis_name: AxisName
) -> tuple[jax.Array, Arrays]:
    """Of `all_gather_matmul`: dx, whose reduce-scatter takes `form`, and dw of each weight, for which `x` is gathered
    again.

        monolithic   gather x beside dy w^T, then reduce-scatter beside x^T dy
        ring         both rings at once
        hybrid       gather x beside the first chunk, which has no collective of its own
        mosaic       gather x before the kernel, beside what precedes it: a kernel runs with no other collective
    """
    if form.name in _DIRECTIONS and isinstance(axis_name, str):
        dx = matmul_reduce_scatter(form, cotangents, weights, axis_name, transposed=True)
        dw = ring.gathered_row_product(x, _joined(cotangents, axis=-1), axis_name, _DIRECTIONS[form.name])
        return dx, _split(dw, [w.shape[1] for w in weights])
    gathered = monolithic.all_gather(x, axis_name)
    if form.name == "monolithic" or not isinstance(axis_name, str):
        sums = monolithic.sum_of_products(cotangents, weights, transposed=True)
        gathered, sums = lax.optimization_barrier((gathered, sums))
        dx = monolithic.reduce_scatter(sums, axis_name)
    else:
        if form.name == "mosaic":
            gathered, cotangents = lax.optimization_barrier((gathered, cotangents))
        dx = matmul_reduce_scatter(form, cotangents, weights, axis_name, transposed=True)
    return dx, tuple(row_product(gathered, dy) for dy in cotangents)


def _joined(arrays: Arrays, axis: int) -> jax.Array:
    """Side by side; a single array is not copied."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=axis)


def _split(y: jax.Array, columns: Sequence[int]) -> Arrays:
    """The other way round, along the last dimension."""
    ends = list(accumulate(columns))
    return tuple(
        y if width == y.shape[-1] else lax.slice_in_dim(y, end - width, end, axis=y.ndim - 1)
        for width, end in zip(columns, ends, strict=True)
    )
