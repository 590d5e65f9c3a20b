"""The layers of Llama 3 as functions on arrays: RMS norms, rotary attention with grouped queries, and SwiGLU.

`x` is the residual stream `[batch, seq / tp, hidden]` (`common.layers`). Models with experts may also have LayerNorms
and biases (`moe.model`).
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dhelix.models.common.layers import (
    Rotation,
    causal_attention,
    layer_norm,
    recomputed,
    rope_frequencies,
    rotate,
    turned,
)
from dhelix.models.common.parallel import Parallel
from dhelix.models.llama.llama_config import LlamaConfig


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x` divided by its root mean square, which is computed in float32, and multiplied by `weight [hidden]`."""

    def normalise(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        return (wide * scale).astype(x.dtype) * weight

    return recomputed(normalise)(x, weight)


def norm(config: LlamaConfig, weights: Mapping[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    """The norm `name` of `weights`: a LayerNorm if it has a bias, and otherwise an RMS norm."""
    bias = weights.get(f"{name}_bias")
    if bias is None:
        return rms_norm(x, weights[name], config.norm_eps)
    return layer_norm(x, weights[name], bias, config.norm_eps)


def rotation(config: LlamaConfig, positions: jax.Array) -> Rotation:
    """The cosines and sines of the rotary embedding at `positions [seq]`, float32 `[seq, 1, head_dim / 2]` each.

    If `rope_factor` is above 1, Llama 3.1's rule applies. Wavelengths above 8192 tokens, the sequence length of Llama
    3's training, are stretched by the factor. Wavelengths below a quarter of 8192 do not change, and wavelengths
    between both limits are stretched by less than the factor.
    """
    frequency = rope_frequencies(config.rope_theta, config.head_dim)
    if config.rope_factor != 1.0:
        turns = 8192 * frequency / (2 * math.pi)
        keep = jnp.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        frequency = frequency * (keep + (1.0 - keep) / config.rope_factor)
    return turned(positions, frequency)


def query_key_value(
    config: LlamaConfig, parallel: Parallel, weights: Mapping[str, jax.Array], x: jax.Array, by: Rotation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of this device's heads, `[batch, seq, heads or kv_heads, head_dim]`.

    The input `x [batch, seq / tp, hidden]` is normalised first. Query and key have the rotary embedding `by`.
    """
    h = norm(config, weights, "attention_norm", x)
    projections = [weights[name] for name in ("wq", "wk", "wv")]
    products = parallel.gather_matmul("bsh,hnd->bsnd", h, projections)
    heads = (_with_bias(product, weights.get(name)) for product, name in zip(products, ("bq", "bk", "bv"), strict=True))
    return rotate(next(heads), by), rotate(next(heads), by), next(heads)


def _with_bias(product: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`product [batch, seq, heads, head_dim]` plus `bias [heads * head_dim]`, if there is one."""
    return product if bias is None else product + bias.reshape(product.shape[2:])


def attention_output(parallel: Parallel, weights: Mapping[str, jax.Array], out: jax.Array) -> jax.Array:
    """The output projection of `out [batch, seq, heads, head_dim]`, which is the output of this device's heads.

    Returns:
      The addend to the residual stream, `[batch, seq / tp, hidden]`.
    """
    out = parallel.split_features(out)
    product = parallel.scatter_product(parallel.row_matmul("bsnd,ndh->bsh", out, weights["wo"]))
    return product + weights["bo"] if "bo" in weights else product


def attention_block(
    config: LlamaConfig,
    parallel: Parallel,
    weights: Mapping[str, jax.Array],
    x: jax.Array,
    by: Rotation,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Attention with this device's heads: the addend to the residual stream `x [batch, seq / tp, hidden]`."""
    query, key, value = query_key_value(config, parallel, weights, x, by)
    return attention_output(parallel, weights, causal_attention(config, parallel, query, key, value, segments))


def feed_forward_block(
    config: LlamaConfig, parallel: Parallel, weights: Mapping[str, jax.Array], x: jax.Array
) -> jax.Array:
    """SwiGLU with this device's columns of the hidden layer: the addend to `x [batch, seq / tp, hidden]`."""
    h = norm(config, weights, "ffn_norm", x)
    gate, up = parallel.gather_matmul("bsh,hf->bsf", h, [weights["w_gate"], weights["w_up"]])

    @recomputed
    def down(gate: jax.Array, up: jax.Array, w_down: jax.Array) -> jax.Array:
        return parallel.row_matmul("bsf,fh->bsh", jax.nn.silu(gate) * up, w_down)

    return parallel.scatter_product(down(gate, up, weights["w_down"]))


def decoder_layer(
    config: LlamaConfig,
    parallel: Parallel,
    weights: Mapping[str, jax.Array],
    x: jax.Array,
    by: Rotation,
    segments: jax.Array | None = None,
) -> jax.Array:
    """The residual stream after one layer. Attention, and then feed-forward, are added to the residual stream."""
    x = x + attention_block(config, parallel, weights, x, by, segments)
    return x + feed_forward_block(config, parallel, weights, x)
