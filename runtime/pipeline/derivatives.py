"""Derives the functions that a pipeline runs: the parts of a chain (`chain.py`), forward and backward.

    layer_forward    (context, x, weights)              -> x, residuals
    layer_backward   (context, weights, residuals, dx)  -> dx, dweights
    embed            (ends, batch)                      -> x
    embed_backward   (ends, batch, dx)                  -> dends
    head             (ends, batch, x)                   -> dx, dends, outputs

Embedding and head are the ends of the chain; in the table, `ends` are their parameters.

`jax.vjp` keeps all values that the backward pass reads. Here, only values that depend on x are kept as residuals. The
weights stay in memory for the whole step, so they need no copy. Values that are made from weights and context alone (a
cast, a transpose) are recomputed in the backward pass. So a slot of the residual ring (`executor.py`) contains only
activations.

Embedding and head keep no residuals. The head's forward and backward pass run together. The embedding's backward pass
repeats its forward pass, and XLA drops the parts that the gradient of a look-up does not need.

Values that are not floating-point (counters) are passed from layer to layer and have no cotangent. `derive` traces all
functions under the mesh of its caller. The functions may run under a mesh in which more axes are manual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from dhelix.runtime.pipeline.chain import Chain
from dhelix.runtime.pipeline.jaxprs import as_keys, as_numbers, depending, part, shape, traced

Values = list[Any]


@dataclass(frozen=True)
class Derivatives:
    """The functions of the module's table. Arguments and results are flat lists of arrays.

    Attributes:
      context: (batch) -> what every layer reads besides its weights; see `Chain`.
      context_of_batch: whether `context` differs from micro-batch to micro-batch.
      state: shapes of x.
      moving: indices of the arrays of x that have cotangents. Lists of cotangents contain only these arrays.
      weight: (batch) -> the micro-batch's weight in the sum over micro-batches.
      trained: indices of the weights that have gradients. Lists of gradients contain only these weights.
      trained_ends: indices of the ends' parameters that have gradients.
      residuals: shapes of the residuals of one layer.
      outputs: shapes of the outputs of `head`: the loss function's outputs times the micro-batch's weight.
    """

    context: Callable[..., Values]
    context_of_batch: bool
    layer_forward: Callable[..., tuple[Values, Values]]
    layer_backward: Callable[..., tuple[Values, Values]]
    weight: Callable[..., jax.Array]
    embed: Callable[..., Values]
    embed_backward: Callable[..., Values]
    head: Callable[..., tuple[Values, Values, Values]]
    state: tuple[jax.ShapeDtypeStruct, ...]
    moving: tuple[int, ...]
    trained: tuple[int, ...]
    trained_ends: tuple[int, ...]
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]


def derive(
    chain: Chain, ends: Sequence[Any], batch: Sequence[Any], seed: Callable[[Sequence[Any]], jax.Array]
) -> Derivatives:
    """Derives the functions of a pipeline from a chain.

    Args:
      chain: the loss function's parts.
      ends: shapes of the parameters of embedding and head.
      batch: shapes of one micro-batch.
      seed: (batch) -> the cotangent of the micro-batch's loss. It is the micro-batch's weight in the sum.
    """
    state, weights = list(chain.state), [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in chain.weights]
    moving, trained, trained_ends = _floating(state), _floating(weights), _floating(ends)
    ends, batch = list(ends), list(batch)
    cotangents = [state[i] for i in moving]
    context = traced(chain.context, batch)

    def embed_backward(ends: Values, batch: Values, cotangents: Values) -> Values:
        def embed(trained: Values) -> Values:
            x = chain.embed(_with(ends, trained_ends, trained), batch)
            return [x[i] for i in moving]

        return jax.vjp(embed, [ends[i] for i in trained_ends])[1](cotangents)[0]

    def head(ends: Values, batch: Values, x: Values) -> tuple[Values, Values, Values]:
        weight = seed(batch)

        def loss(floats: Values, trained: Values) -> tuple[jax.Array, Values]:
            outputs = chain.head(_with(ends, trained_ends, trained), batch, _with(x, moving, floats))
            return outputs[0], outputs

        value, vjp, outputs = jax.vjp(loss, [x[i] for i in moving], [ends[i] for i in trained_ends], has_aux=True)
        cotangents, gradients = vjp(weight.astype(value.dtype))
        return *_unless_weightless(weight, (cotangents, gradients)), [_weighted(output, weight) for output in outputs]

    run_head = traced(head, ends, batch, state)
    forward, backward, residuals = _layer(chain, jax.eval_shape(context, batch), state, weights, moving, trained)
    return Derivatives(
        context=context,
        context_of_batch=chain.context_of_batch,
        layer_forward=forward,
        layer_backward=backward,
        weight=traced(seed, batch),
        embed=traced(chain.embed, ends, batch),
        embed_backward=traced(embed_backward, ends, batch, cotangents),
        head=run_head,
        state=tuple(state),
        moving=moving,
        trained=trained,
        trained_ends=trained_ends,
        residuals=residuals,
        outputs=tuple(jax.eval_shape(run_head, ends, batch, state)[2]),
    )


def _layer(
    chain: Chain, context: Values, x: Values, weights: Values, moving: Sequence[int], trained: Sequence[int]
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """The forward function and the backward function of one layer, and the shapes of its residuals."""
    structure: list[Any] = []  # the tree structure of the function that jax.vjp returns

    def both(context: Values, x: Values, weights: Values) -> tuple[Values, Values]:
        def of_floats(floats: Values, floating_weights: Values) -> tuple[Values, Values]:
            out = chain.layer(context, _with(x, moving, floats), _with(weights, trained, floating_weights))
            return [out[i] for i in moving], out

        _, vjp, out = jax.vjp(of_floats, [x[i] for i in moving], [weights[i] for i in trained], has_aux=True)
        kept, tree = jax.tree.flatten(vjp)
        structure[:] = [tree]
        return out, kept

    jaxpr = jax.make_jaxpr(both)(context, x, weights)
    from_x, from_weights = len(context), len(context) + len(x)
    out, kept = jaxpr.outvars[: len(x)], jaxpr.outvars[len(x) :]
    fixed = jaxpr.invars[:from_x] + jaxpr.invars[from_weights:]
    moved = depending(jaxpr, jaxpr.invars[from_x:from_weights])
    distinct = [atom for atom in dict.fromkeys(_variables(kept))]
    residuals = [var for var in distinct if var in moved]
    again = [var for var in distinct if var not in moved]
    run_forward, run_again = part(jaxpr, jaxpr.invars, [*out, *residuals]), part(jaxpr, fixed, again)

    kinds = list(map(shape, residuals))

    def forward(context: Values, x: Values, weights: Values) -> tuple[Values, Values]:
        results = run_forward(*context, *x, *weights)
        return results[: len(x)], as_numbers(results[len(x) :])

    def backward(context: Values, weights: Values, saved: Values, cotangents: Values) -> tuple[Values, Values]:
        values = dict(zip([*residuals, *again], [*as_keys(saved, kinds), *run_again(*context, *weights)], strict=True))
        leaves = [atom.val if isinstance(atom, jex_core.Literal) else values[atom] for atom in kept]
        return jax.tree.unflatten(structure[0], leaves)(cotangents)

    shapes = jax.eval_shape(as_numbers, kinds)
    run_backward = traced(backward, context, weights, shapes, [x[i] for i in moving])
    return traced(forward, context, x, weights), run_backward, tuple(shapes)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]


def _floating(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, value in enumerate(values) if jnp.issubdtype(value.dtype, jnp.inexact))


def _with(values: Sequence[Any], places: Sequence[int], replaced: Sequence[Any]) -> Values:
    result = list(values)
    for place, value in zip(places, replaced, strict=True):
        result[place] = value
    return result


def _unless_weightless(weight: jax.Array, values: Any) -> Any:
    """`values`, or zeros if the micro-batch has weight 0. The loss of a micro-batch without tokens may be 0/0."""
    return jax.tree.map(lambda value: jnp.where(weight == 0, jnp.zeros_like(value), value), values)


def _weighted(output: jax.Array, weight: jax.Array) -> jax.Array:
    if not jnp.issubdtype(output.dtype, jnp.inexact):
        return output
    return _unless_weightless(weight, output * weight.astype(output.dtype))
