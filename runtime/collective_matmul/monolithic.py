"""The form "monolithic": collective and matmul run one after the other. Other forms are compared with this form.

    gathered = all-gather(x)         sums = x @ w                       sums = x @ w
    out = gathered @ w               out = reduce-scatter(sums)         out = all-reduce(sums)

This form works for every size and type, and for a tuple of mesh axes. Communication does not overlap with the matmul.
"""

import functools
import operator
from collections.abc import Sequence

import jax
from jax import lax

from dhelix.runtime.collective_matmul.products import matmul, rows_axis

AxisName = str | tuple[str, ...]


def all_gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Gathers `x [..., rows / n, k]` of all devices to `[..., rows, k]`."""
    return lax.all_gather(x, axis_name, axis=rows_axis(x), tiled=True)


def sum_of_products(xs: Sequence[jax.Array], weights: Sequence[jax.Array], transposed: bool = False) -> jax.Array:
    """This device's partial sum: the sum over all pairs of `x` times `w`."""
    return functools.reduce(operator.add, (matmul(x, w, transposed) for x, w in zip(xs, weights, strict=True)))


def reduce_scatter(sums: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sums `[..., rows, columns]` over the devices and scatters the rows: `[..., rows / n, columns]`."""
    return lax.psum_scatter(sums, axis_name, scatter_dimension=rows_axis(sums), tiled=True)
