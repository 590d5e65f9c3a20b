"""Derivatives of collective matmuls. Most of them are collective matmuls, too.

    forward                            backward, with dy the cotangent of y
    y = all_gather_matmul(x, w)        dx = matmul_reduce_scatter(dy, w^T)      dw = gathered x^T dy
    y = matmul_reduce_scatter(x, w)    dx = all_gather_matmul(dy, w^T)          dw = x^T gathered dy
    y = matmul_all_reduce(x, w)        dx = dy w^T                              dw = x^T dy

The residuals are x and w as passed in. For dw of `all_gather_matmul`, x is gathered again, as in Megatron. So on n
devices, the residual takes 1 / n of the gathered x's memory. For dw of `matmul_reduce_scatter`, dy is gathered only
once, for dx and dw. For each collective matmul of the backward pass, `form_choice.resolve` chooses a form of its own.
It is the form that the user asked for, if that form is possible there.

Exception: with "auto", dx of `all_gather_matmul` uses the monolithic form. The backward pass of `all_gather_matmul` has
two matmuls and two collectives, so each collective overlaps with a whole matmul. The gather of x overlaps with dy w^T.
Then the reduce-scatter of dx overlaps with the matmul of dw.

The derivatives are equal to those that JAX computes. Under `shard_map` with `check_vma=True`, the cotangent of an
all-reduce's result is whole on each device. With `check_vma=False`, each device has only its own contribution to the
cotangent, and JAX first sums the contributions. This module does the same, by one more all-reduce in the backward pass.
Source: "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2, describes these pairs of forward
and backward operations.
"""

import functools
from typing import Any

import jax
from jax import lax

from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form, Site
from dhelix.runtime.collective_matmul import execution
from dhelix.runtime.collective_matmul.execution import Arrays
from dhelix.runtime.collective_matmul.form_choice import Place, resolve
from dhelix.runtime.collective_matmul.monolithic import AxisName
from dhelix.runtime.collective_matmul.products import matmul, row_product


def place_of(kind: str, x: jax.Array, contraction: int, columns: int, axis_name: AxisName) -> Place:
    """The `Place` of a collective matmul of `x [..., rows, contraction]` and a weight `[contraction, columns]`."""
    n = lax.axis_size(axis_name)
    rows = x.size // max(x.shape[-1], 1) * (n if kind == "all_gather_matmul" else 1)
    own = x.shape[-2] // (n if kind == "matmul_reduce_scatter" else 1)
    return Place(Site(kind, rows, contraction, columns, x.dtype.name, n), axis_name, own)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which `x` varies according to its type; empty under `shard_map` with `check_vma=False`."""
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # the newer and the older name in JAX


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def all_gather_matmul(x: jax.Array, weights: Arrays, axis_name: AxisName, wanted: Form | None) -> Arrays:
    """Gathers `x` and multiplies it by each weight, in the form that `resolve` finds for `wanted`.

    Operands must vary (in the sense of `shard_map`) over the same mesh axes, including `axis_name`.
    """
    place = place_of("all_gather_matmul", x, x.shape[-1], sum(w.shape[1] for w in weights), axis_name)
    return execution.all_gather_matmul(resolve(wanted, place), x, weights, axis_name)[0]


def _all_gather_matmul_forward(x: jax.Array, weights: Arrays, axis_name: AxisName, wanted: Form | None):
    return all_gather_matmul(x, weights, axis_name, wanted), (x, weights)


def _all_gather_matmul_backward(axis_name: AxisName, wanted: Form | None, kept: tuple[jax.Array, Arrays], dys: Arrays):
    x, weights = kept
    contraction = sum(w.shape[1] for w in weights)
    place = place_of("matmul_reduce_scatter", dys[0], contraction, x.shape[-1], axis_name)
    # In the monolithic form, each collective overlaps with a whole matmul. This is more overlap than in any other form.
    form = MONOLITHIC if wanted is None else resolve(wanted, place)
    return execution.all_gather_gradients(form, x, weights, dys, axis_name)


all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul_reduce_scatter(x: jax.Array, w: jax.Array, axis_name: AxisName, wanted: Form | None) -> jax.Array:
    """This device's rows of the sum over devices of `x` times `w`. Operands must vary as in `all_gather_matmul`."""
    place = place_of("matmul_reduce_scatter", x, x.shape[-1], w.shape[1], axis_name)
    return execution.matmul_reduce_scatter(resolve(wanted, place), x, w, axis_name)


def _matmul_reduce_scatter_forward(x: jax.Array, w: jax.Array, axis_name: AxisName, wanted: Form | None):
    return matmul_reduce_scatter(x, w, axis_name, wanted), (x, w)


def _matmul_reduce_scatter_backward(
    axis_name: AxisName, wanted: Form | None, kept: tuple[jax.Array, jax.Array], dy: jax.Array
):
    x, w = kept
    form = resolve(wanted, place_of("all_gather_matmul", dy, w.shape[1], w.shape[0], axis_name))
    (dx,), gathered = execution.all_gather_matmul(form, dy, (w,), axis_name, transposed=True)
    return dx, row_product(x, gathered, w)


matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul_all_reduce(x: jax.Array, w: jax.Array, axis_name: AxisName, wanted: Form | None) -> jax.Array:
    """The sum over devices of `x` times `w`. Operands must vary as in `all_gather_matmul`.

    The result does not vary over `axis_name`.
    """
    place = place_of("matmul_all_reduce", x, x.shape[-1], w.shape[1], axis_name)
    return execution.matmul_all_reduce(resolve(wanted, place), x, w, axis_name)


def _matmul_all_reduce_forward(x: jax.Array, w: jax.Array, axis_name: AxisName, wanted: Form | None):
    return matmul_all_reduce(x, w, axis_name, wanted), (x, w)


def _matmul_all_reduce_backward(
    axis_name: AxisName, wanted: Form | None, kept: tuple[jax.Array, jax.Array], dy: jax.Array
):
    x, w = kept
    tracked = varying_axes(x)
    dy = lax.pcast(dy, axis_name, to="varying") if tracked else lax.psum(dy, axis_name)
    return matmul(dy, w, transposed=True), row_product(x, dy, w)


matmul_all_reduce.defvjp(_matmul_all_reduce_forward, _matmul_all_reduce_backward)
