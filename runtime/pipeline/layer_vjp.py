"""One layer's forward and backward pass as two functions, with what must be kept between them.

    forward:  (context, x, weights)               -> x, residuals
    backward: (context, weights, residuals, dx)   -> dx, dweights

`jax.vjp` keeps whatever the backward pass reads. Of that only what depends on x is a residual here: weights lie where
they lie for the whole step, and what is made of weights and context alone (a cast, a transpose) is made again in the
backward pass. So a slot of the residual ring holds activations and nothing else.

State that is no floating-point number (counters) is handed on and has no cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from dhelix.runtime.pipeline.jaxprs import depending, part, shape

Values = list[Any]
Layer = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Values]


@dataclass(frozen=True)
class LayerVjp:
    """
    Attributes:
      forward: (context, x, weights) -> (x, residuals).
      backward: (context, weights, residuals, cotangents of the floating-point part of x) -> (the same of the layer's
        input, gradients of the floating-point weights).
      residuals: their shapes.
    """

    forward: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Values, Values]]
    backward: Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Values, Values]]
    residuals: tuple[jax.ShapeDtypeStruct, ...]


def floating(values: Sequence[Any]) -> list[int]:
    """Numbers of those that have a gradient."""
    return [i for i, value in enumerate(values) if jnp.issubdtype(value.dtype, jnp.inexact)]


def layer_vjp(layer: Layer, context: Sequence[Any], x: Sequence[Any], weights: Sequence[Any]) -> LayerVjp:
    """The passes of `layer(context, x, weights) -> x`, for arguments of these shapes."""
    moving, trained = floating(x), floating(weights)
    backward_of: list[Any] = []  # the structure of what jax.vjp returns: the same in each trace

    def forward(context: Sequence[Any], x: Sequence[Any], weights: Sequence[Any]) -> tuple[Values, Values]:
        def of_floats(floats: Sequence[Any], trained_weights: Sequence[Any]) -> tuple[Values, Values]:
            out = layer(context, _with(x, moving, floats), _with(weights, trained, trained_weights))
            return [out[i] for i in moving], out

        _, vjp, out = jax.vjp(of_floats, [x[i] for i in moving], [weights[i] for i in trained], has_aux=True)
        kept, structure = jax.tree.flatten(vjp)
        backward_of[:] = [structure]
        return out, kept

    sizes = len(context), len(x), len(weights)
    jaxpr = jax.make_jaxpr(forward)(list(context), list(x), list(weights))
    structure = backward_of[0]
    kept = jaxpr.outvars[sizes[1] :]
    inputs_of_x = jaxpr.invars[sizes[0] : sizes[0] + sizes[1]]
    fixed = jaxpr.invars[: sizes[0]] + jaxpr.invars[sizes[0] + sizes[1] :]
    moved = depending(jaxpr, inputs_of_x)
    distinct = [atom for atom in dict.fromkeys(kept) if not isinstance(atom, jex_core.Literal)]
    residuals = [v for v in distinct if v in moved]
    again = [v for v in distinct if v not in moved]
    run_forward = part(jaxpr, jaxpr.invars, [*jaxpr.outvars[: sizes[1]], *residuals])
    run_again = part(jaxpr, fixed, again)

    def forward_pass(context: Sequence[Any], x: Sequence[Any], weights: Sequence[Any]) -> tuple[Values, Values]:
        out = run_forward(*context, *x, *weights)
        return out[: sizes[1]], out[sizes[1] :]

    def backward_pass(
        context: Sequence[Any], weights: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[Values, Values]:
        values = dict(zip([*residuals, *again], [*saved, *run_again(*context, *weights)], strict=True))
        leaves = [atom.val if isinstance(atom, jex_core.Literal) else values[atom] for atom in kept]
        floats, gradients = jax.tree.unflatten(structure, leaves)(list(cotangents))
        return floats, gradients

    return LayerVjp(forward_pass, backward_pass, tuple(map(shape, residuals)))


def _with(values: Sequence[Any], places: Sequence[int], replaced: Sequence[Any]) -> Values:
    result = list(values)
    for place, value in zip(places, replaced, strict=True):
        result[place] = value
    return result
