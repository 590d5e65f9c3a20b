"""Runs a collective matmul (a matmul and the collective of its operand or result) in a given form, such as "ring".

The caller must have checked that the form is possible (`form_choice.py`). Several weights may share one collective.
All forms except the monolithic one concatenate the weights once, multiply, and split the result.
"""

from collections.abc import Sequence
from itertools import accumulate

import jax
from jax import lax

from dhelix.profiles.collective_matmul.sites import Form
from dhelix.runtime.collective_matmul import hybrid, monolithic, mosaic, ring
from dhelix.runtime.collective_matmul.monolithic import AxisName
from dhelix.runtime.collective_matmul.products import columns_of, joined, matmul, row_product

_DIRECTIONS = {"ring": ring.RING, "bidirectional_ring": ring.BIDIRECTIONAL}
Arrays = tuple[jax.Array, ...]


def all_gather_matmul(
    form: Form, x: jax.Array, weights: Arrays, axis_name: AxisName, transposed: bool = False
) -> tuple[Arrays, jax.Array]:
    """Gathers `x` and multiplies it by each of `weights`. Returns the products and the gathered `x`.

    If `transposed`, there is only one weight, and the function multiplies by its transpose.
    """
    if form.name == "monolithic" or not isinstance(axis_name, str):
        gathered = monolithic.all_gather(x, axis_name)
        return tuple(matmul(gathered, w, transposed) for w in weights), gathered
    w = _side_by_side(weights)
    if form.name == "mosaic":
        out, gathered = mosaic.all_gather_matmul(x, w, axis_name, form.tiles, transposed)
    elif form.name == "hybrid":
        out, gathered = hybrid.all_gather_matmul(x, w, axis_name, form.chunks, transposed)
    else:
        out, gathered = ring.all_gather_matmul(x, w, axis_name, _DIRECTIONS[form.name], transposed)
    return _split(out, [columns_of(w, transposed) for w in weights]), gathered


def matmul_reduce_scatter(form: Form, x: jax.Array, w: jax.Array, axis_name: AxisName) -> jax.Array:
    """This device's rows, `[..., rows / n, columns]`, of the sum over devices of `x [..., rows, k / n]` times `w`."""
    if form.name == "monolithic" or not isinstance(axis_name, str):
        return monolithic.reduce_scatter(matmul(x, w), axis_name)
    if form.name == "mosaic":
        return mosaic.matmul_reduce_scatter(x, w, axis_name, form.tiles)
    if form.name == "hybrid":
        return hybrid.matmul_reduce_scatter((x,), w, axis_name, form.chunks)[0]
    return ring.matmul_reduce_scatter((x,), w, axis_name, _DIRECTIONS[form.name])[0]


def matmul_all_reduce(form: Form, x: jax.Array, w: jax.Array, axis_name: AxisName) -> jax.Array:
    """The sum over devices of `x [..., rows, k / n]` times `w`. Each device gets all rows, `[..., rows, columns]`."""
    if form.name == "monolithic" or not isinstance(axis_name, str):
        return lax.psum(matmul(x, w), axis_name)
    if form.name == "mosaic":
        return mosaic.matmul_all_reduce(x, w, axis_name, form.tiles)
    if form.name == "hybrid":
        return hybrid.matmul_all_reduce(x, w, axis_name, form.chunks)
    return ring.matmul_all_reduce(x, w, axis_name, _DIRECTIONS[form.name])


def all_gather_gradients(
    form: Form, x: jax.Array, weights: Arrays, cotangents: Arrays, axis_name: AxisName
) -> tuple[jax.Array, Arrays]:
    """The gradients of `all_gather_matmul`: dx, and dw of each weight. `x` is gathered again for dw.

    The reduce-scatter of dx uses `form`. What the gather of `x` overlaps with depends on the form:

        monolithic       The gather overlaps with dy w^T. Then the reduce-scatter overlaps with x^T dy.
        ring, hybrid     The gather overlaps with the first chunk's matmul, during which no other collective runs.
        mosaic           The gather overlaps with operations before the kernel. No collective may run beside the kernel.
    """
    gathered = monolithic.all_gather(x, axis_name)
    if form.name == "monolithic" or not isinstance(axis_name, str):
        sums = monolithic.sum_of_products(cotangents, weights, transposed=True)
        gathered, sums = lax.optimization_barrier((gathered, sums))
        dx = monolithic.reduce_scatter(sums, axis_name)
    else:
        w = _side_by_side(weights)
        if form.name == "mosaic":
            gathered, cotangents = lax.optimization_barrier((gathered, cotangents))
            dx = mosaic.matmul_reduce_scatter(joined(cotangents, axis=-1), w, axis_name, form.tiles, transposed=True)
        elif form.name == "hybrid":
            dx, (gathered,) = hybrid.matmul_reduce_scatter(
                cotangents, w, axis_name, form.chunks, transposed=True, beside=(gathered,)
            )
        else:
            dx, (gathered,) = ring.matmul_reduce_scatter(
                cotangents, w, axis_name, _DIRECTIONS[form.name], transposed=True, beside=(gathered,)
            )
    dws = tuple(row_product(gathered, dy, w) for dy, w in zip(cotangents, weights, strict=True))
    # Without this barrier, XLA runs users of dx before dw, and the last collective overlaps with no compute.
    return lax.optimization_barrier((dx, dws))


def _side_by_side(weights: Arrays) -> jax.Array:
    """Concatenates the weights to `[k, all columns]`. Without the barrier, XLA would copy them again for each use."""
    return weights[0] if len(weights) == 1 else lax.optimization_barrier(joined(weights, axis=1))


def _split(y: jax.Array, columns: Sequence[int]) -> Arrays:
    """Splits the last dimension of `y` into parts. `columns` has the number of columns of each part."""
    ends = list(accumulate(columns))
    return tuple(
        y if width == y.shape[-1] else lax.slice_in_dim(y, end - width, end, axis=y.ndim - 1)
        for width, end in zip(columns, ends, strict=True)
    )
