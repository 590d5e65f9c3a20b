"""Moves tokens into the rows of their experts, and back.

`dispatch` and `combine` are gathers, both in the forward and in the backward pass: a row belongs to at most one choice,
so the transpose of a gather is a gather along the inverse map. JAX's own transpose would be a scatter-add, which is
slow and not deterministic on GPUs.

    dispatch   rows[r] = x[token of choices[r]]                      dx[t]    = sum over k of drows[rows[t, k]]
    combine    y[t] = sum over k of weights[t, k] rows[rows[t, k]]   drows[r] = weight of choices[r] x dy[its token]
"""

import jax
import jax.numpy as jnp


def _read(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[index]` along dimension 0; zeros where `index` is one past the end."""
    return values.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: jax.Array, rows: jax.Array, choices: jax.Array) -> jax.Array:
    """The rows of all experts.

    Args:
      x: tokens `[T, hidden]`.
      rows, choices: of the `Routing`.

    Returns:
      `[E * C, hidden]`; empty rows are zero.
    """
    return _read(x, choices // rows.shape[1])


def _dispatch_forward(x: jax.Array, rows: jax.Array, choices: jax.Array):
    return dispatch(x, rows, choices), rows


def _dispatch_backward(rows: jax.Array, cotangent: jax.Array):
    return _sum_of(cotangent, rows), None, None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


def _sum_of(values: jax.Array, rows: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """The sum over k of `values[rows[t, k]]`, weighted; float32 sums, in the type of `values`."""
    total = jnp.float32(0)
    for k in range(rows.shape[1]):
        part = _read(values, rows[:, k]).astype(jnp.float32)
        total = total + (part if weights is None else part * weights[:, k, None])
    return total.astype(values.dtype)


@jax.custom_vjp
def combine(values: jax.Array, weights: jax.Array, rows: jax.Array, choices: jax.Array) -> jax.Array:
    """The weighted sum of what the experts computed for each token. Dropped choices add nothing.

    Args:
      values: results of all rows, `[E * C, hidden]`.
      weights, rows, choices: of the `Routing`.

    Returns:
      `[T, hidden]`.
    """
    return _sum_of(values, rows, weights)


def _combine_forward(values: jax.Array, weights: jax.Array, rows: jax.Array, choices: jax.Array):
    return combine(values, weights, rows, choices), (values, weights, rows, choices)


def _combine_backward(kept: tuple[jax.Array, jax.Array, jax.Array, jax.Array], cotangent: jax.Array):
    values, weights, rows, choices = kept
    k = rows.shape[1]
    scale = _read(weights.reshape(-1), choices)[:, None]
    d_values = (scale * _read(cotangent, choices // k)).astype(values.dtype)
    wide = cotangent.astype(jnp.float32)
    d_weights = [jnp.sum(_read(values, rows[:, n]).astype(jnp.float32) * wide, axis=-1) for n in range(k)]
    return d_values, jnp.stack(d_weights, axis=-1), None, None


combine.defvjp(_combine_forward, _combine_backward)
