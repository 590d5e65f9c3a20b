"""Collective matmuls for use under `jax.shard_map`: a matmul fused with the collective of its operand or result.

    y = all_gather_matmul(x, w, "tp")             = all_gather(x) @ w          column-parallel layer, rows sharded
    q, k, v = all_gather_matmul(x, (wq, wk, wv), "tp")                         one gather for all
    y = matmul_reduce_scatter(x, w, "tp")         = psum_scatter(x @ w)        row-parallel layer, rows sharded
    y = matmul_all_reduce(x, w, "tp")             = psum(x @ w)                row-parallel layer, rows whole

Results and derivatives are equal to those of the expression on the right, up to the order of additions. They have the
operands' type. `form` selects the implementation. `form_choice.py` describes the forms, and `gradients.py` the
residuals. Batch dimensions come before rows; each batch element's rows are sharded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
from jax import lax

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import Form
from dhelix.runtime.collective_matmul import gradients
from dhelix.runtime.collective_matmul.form_choice import requested
from dhelix.runtime.collective_matmul.monolithic import AxisName


@overload
def all_gather_matmul(x: jax.Array, w: jax.Array, axis_name: AxisName, form: str | Form = "auto") -> jax.Array: ...
@overload
def all_gather_matmul(
    x: jax.Array, w: Sequence[jax.Array], axis_name: AxisName, form: str | Form = "auto"
) -> tuple[jax.Array, ...]: ...
def all_gather_matmul(
    x: jax.Array, w: jax.Array | Sequence[jax.Array], axis_name: AxisName, form: str | Form = "auto"
) -> jax.Array | tuple[jax.Array, ...]:
    """Gathers the rows of `x` over the devices of an axis and multiplies them by `w`.

    Args:
      x: `[..., rows / n, k]`, this device's rows.
      w: `[k, columns]`, or a sequence of such weights. For a sequence, `x` is gathered only once.
      axis_name: mesh axis of n devices. A tuple of several axes always uses the monolithic form.
      form: "auto" for the fastest form by measurement; or the name of a form (one of `sites.FORMS`), the key of a form
        (such as "hybrid:4"), or a `Form`.

    Returns:
      The product `[..., rows, columns]`, with rows in the order of devices. For a sequence of weights, a tuple of such
      products.

    Raises:
      DhelixError: the operands do not fit, the axis does not exist, or the requested form is impossible.
    """
    axis_name = _axis(axis_name)
    several = isinstance(w, Sequence)
    weights = tuple(w) if several else (w,)
    x, *weights = _checked("all_gather_matmul", x, weights, axis_name)
    place = gradients.place_of("all_gather_matmul", x, x.shape[-1], sum(v.shape[1] for v in weights), axis_name)
    products: Any = gradients.all_gather_matmul(x, tuple(weights), axis_name, requested(form, place))
    return products if several else products[0]


def matmul_reduce_scatter(x: jax.Array, w: jax.Array, axis_name: AxisName, form: str | Form = "auto") -> jax.Array:
    """Multiplies `x` by `w` and sums the products over the devices of an axis. Each device keeps its rows of the sum.

    Args:
      x: `[..., rows, k / n]`, this device's part of the contraction. The number of rows must be divisible by n.
      w: `[k / n, columns]`, this device's part of the contraction.
      axis_name: see `all_gather_matmul`.
      form: see `all_gather_matmul`.

    Returns:
      This device's rows of the sum, `[..., rows / n, columns]`.

    Raises:
      DhelixError: as for `all_gather_matmul`, or the number of rows is not divisible by n.
    """
    axis_name = _axis(axis_name)
    x, w = _checked("matmul_reduce_scatter", x, (w,), axis_name)
    n = lax.axis_size(axis_name)
    if x.shape[-2] % n:
        raise DhelixError(
            f"matmul_reduce_scatter: {x.shape[-2]} rows do not divide by the {n} devices of {axis_name!r}: pad the"
            " rows, or use matmul_all_reduce"
        )
    place = gradients.place_of("matmul_reduce_scatter", x, x.shape[-1], w.shape[1], axis_name)
    return gradients.matmul_reduce_scatter(x, w, axis_name, requested(form, place))


def matmul_all_reduce(x: jax.Array, w: jax.Array, axis_name: AxisName, form: str | Form = "auto") -> jax.Array:
    """Multiplies `x` by `w` and sums the products over the devices of an axis.

    Args:
      x: `[..., rows, k / n]`, this device's part of the contraction.
      w: `[k / n, columns]`, this device's part of the contraction.
      axis_name: see `all_gather_matmul`.
      form: see `all_gather_matmul`. The two ring forms scatter rows and gather them again, so the number of rows must
        be divisible by n.

    Returns:
      The sum `[..., rows, columns]`, the same on all devices.

    Raises:
      DhelixError: as for `all_gather_matmul`.
    """
    axis_name = _axis(axis_name)
    x, w = _checked("matmul_all_reduce", x, (w,), axis_name)
    place = gradients.place_of("matmul_all_reduce", x, x.shape[-1], w.shape[1], axis_name)
    return gradients.matmul_all_reduce(x, w, axis_name, requested(form, place))


@dataclass(frozen=True)
class CollectiveMatmuls:
    """The three functions of this module in one form, as an object for `ManualParallel(collective_matmuls=...)`."""

    form: str | Form = "auto"

    def all_gather_matmul(
        self, x: jax.Array, weights: Sequence[jax.Array], axis_name: AxisName
    ) -> tuple[jax.Array, ...]:
        """See `all_gather_matmul`."""
        return all_gather_matmul(x, tuple(weights), axis_name, self.form)

    def matmul_reduce_scatter(self, x: jax.Array, w: jax.Array, axis_name: AxisName) -> jax.Array:
        """See `matmul_reduce_scatter`."""
        return matmul_reduce_scatter(x, w, axis_name, self.form)

    def matmul_all_reduce(self, x: jax.Array, w: jax.Array, axis_name: AxisName) -> jax.Array:
        """See `matmul_all_reduce`."""
        return matmul_all_reduce(x, w, axis_name, self.form)


def _axis(axis_name: AxisName) -> AxisName:
    """The name of the axis if there is one axis, even if it was given as a tuple. Several axes stay a tuple."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return names[0] if len(names) == 1 else names


def _checked(kind: str, x: jax.Array, weights: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """Checks the operands and makes all of them vary over the same mesh axes, as `lax.dot_general` does.

    So if an operand was replicated over some devices, JAX sums its cotangent over them. The derivatives in
    `gradients.py` need not sum it.
    """
    try:
        lax.axis_size(axis_name)
    except NameError:
        around = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        raise DhelixError(
            f"{kind}: {axis_name!r} is not a mesh axis of a surrounding shard_map (its axes: {around}): call it inside "
            "a shard_map over a mesh with that axis"
        ) from None
    if not weights:
        raise DhelixError(f"{kind}: no weights: give at least one")
    if odd := [operand for operand in (x, *weights) if not hasattr(operand, "ndim")]:
        raise DhelixError(f"{kind}: {type(odd[0]).__name__} is not an array: give x, and one w or a tuple of them")
    for w in weights:
        if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
            raise DhelixError(
                f"{kind}: x {list(x.shape)} and w {list(w.shape)} do not multiply: give [..., rows, k] and [k, columns]"
            )
        if x.dtype != w.dtype:
            raise DhelixError(f"{kind}: x is {x.dtype.name}, but w is {w.dtype.name}: cast one to the other's type")
    operands = [x, *weights]
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    varying = frozenset(axes).union(*map(gradients.varying_axes, operands))
    return [_varying(operand, varying) for operand in operands]


def _varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - gradients.varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
