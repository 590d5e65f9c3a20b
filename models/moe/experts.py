"""The mixture-of-experts layer: route, exchange, multiply, exchange, combine.

    x [b, s / tp, hidden] -> this device's tokens in rows of all experts   [E, C, hidden]
      all-to-all over ep  -> rows of this device's experts                 [E / ep, ep C, hidden]
      all-gather over tp  -> the rows of all devices of a tp group         [E / ep, tp ep C, hidden]
      SwiGLU, with ffn / tp columns of each expert; reduce-scatter over tp, all-to-all over ep
      weighted sum of each token's rows                                    [b, s / tp, hidden]

The rows have fixed shapes, so an expert multiplies its empty rows, too. Each device routes its own tokens, and its
experts' capacity is for these tokens.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dhelix.models.common.layers import recomputed
from dhelix.models.common.parallel import Parallel
from dhelix.models.llama.layers import norm
from dhelix.models.moe.dispatch import combine, dispatch
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.models.moe.routing import route
from dhelix.models.moe.wide_gradients import Wide, product

AUXILIARY = ("balance", "z", "dropped")
"""What a layer reports about its routing (`Routing`)."""


def experts_block(
    config: MoeConfig, parallel: Parallel, weights: Mapping[str, jax.Array], x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The addend to the residual stream `x [batch, seq / tp, hidden]`, and float32 `[3]` as in `AUXILIARY`."""
    h = norm(config, weights, "ffn_norm", x)
    tokens = h.reshape(-1, config.hidden)
    logits = jnp.einsum("th,he->te", tokens, weights["router"], preferred_element_type=jnp.float32)
    routing = route(config, logits)
    rows = dispatch(tokens, routing.rows, routing.choices).reshape(config.experts, -1, config.hidden)
    rows = parallel.gather_sequence(parallel.to_experts(rows))
    gate, up = (product("erh,ehf->erf", rows, weights[name]) for name in ("w_gate", "w_up"))

    @recomputed
    def down(gate: jax.Array, up: jax.Array, w_down: jax.Array | Wide) -> jax.Array:
        return product("erf,efh->erh", jax.nn.silu(gate) * up, w_down)

    results = parallel.from_experts(parallel.scatter_sequence(down(gate, up, weights["w_down"])))
    y = combine(results.reshape(-1, config.hidden), routing.weights, routing.rows, routing.choices).reshape(x.shape)
    if config.shared:
        y = y + _shared_experts(parallel, weights, h)
    return y, jnp.stack([routing.balance, routing.z, routing.dropped])


def _shared_experts(parallel: Parallel, weights: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """The experts that compute every token of `h [batch, seq / tp, hidden]`: together one SwiGLU."""
    gate, up = parallel.gather_matmul("bsh,hf->bsf", h, [weights["shared_gate"], weights["shared_up"]])

    @recomputed
    def down(gate: jax.Array, up: jax.Array, w_down: jax.Array) -> jax.Array:
        return parallel.row_matmul("bsf,fh->bsh", jax.nn.silu(gate) * up, w_down)

    return parallel.scatter_product(down(gate, up, weights["shared_down"]))
