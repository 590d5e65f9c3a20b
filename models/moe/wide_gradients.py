"""Products of experts whose weights get their gradients in float32, before any rounding to the compute type.

    dw = float32(bfloat16(dot(rows, dy))); total += dw     as JAX differentiates a product with a bfloat16 weight
    total = dot(rows, dy) + total                          here: XLA's product adds to `total` by itself

A gradient has the type of its argument, so a bfloat16 weight cannot have a float32 gradient. `Wide` therefore pairs
the weight with a float32 placeholder of the same shape. The product ignores the placeholder's value, and its derivative
with respect to the placeholder is the weight's gradient. The placeholder takes no memory, because nothing reads it.

Cost: a float32 gradient has twice the size. In a loop over stacked layers, the step is predicted to be slower with it
(docs/research_log.md), so the train step uses `Wide` for unrolled layers only.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wide:
    """A weight in the compute type, and the placeholder that its gradient belongs to: float32, of the same shape."""

    weight: jax.Array
    gradient: jax.Array


def widen(weight: jax.Array) -> Wide:
    return Wide(weight, jnp.zeros(weight.shape, jnp.float32))


def gradients_of(derivatives: Any) -> Any:
    """The gradients of weights, from the derivatives with respect to these weights or to what `widen` made of them."""
    return jax.tree.map(
        lambda each: each.gradient if isinstance(each, Wide) else each,
        derivatives,
        is_leaf=lambda each: isinstance(each, Wide),
    )


def product(spec: str, rows: jax.Array, weight: jax.Array | Wide) -> jax.Array:
    """`einsum(spec, rows, weight)` in the type of `rows`.

    Args:
      spec: two inputs and an output, such as "erh,ehf->erf". Each index stands in two of the three.
    """
    if isinstance(weight, Wide):
        return _product(spec, rows, lax.stop_gradient(weight.weight), weight.gradient)
    return jnp.einsum(spec, rows, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, rows: jax.Array, weight: jax.Array, placeholder: jax.Array) -> jax.Array:
    return jnp.einsum(spec, rows, weight)


def _forward(
    spec: str, rows: jax.Array, weight: jax.Array, placeholder: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.einsum(spec, rows, weight), (rows, weight)


def _backward(
    spec: str, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None, jax.Array]:
    rows, weight = residuals
    inputs, out = spec.split("->")
    of_rows, of_weight = inputs.split(",")
    to_rows = jnp.einsum(f"{out},{of_weight}->{of_rows}", cotangent, weight)
    gradient = jnp.einsum(f"{of_rows},{out}->{of_weight}", rows, cotangent, preferred_element_type=jnp.float32)
    return to_rows, None, gradient


_product.defvjp(_forward, _backward)
