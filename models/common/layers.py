"""The layers of Llama 3 as functions on arrays.

`x` is the residual stream `[batch, seq / tp, hidden]`, which is sequence-parallel between blocks. A block (attention or
feed-forward) gathers the sequence. It multiplies the sequence with this device's shard of the heads or of the hidden
layer, and reduce-scatters the sum. This is Megatron's tensor and sequence parallelism. On a single device, the gather
and the reduce-scatter do nothing, and the same code computes the whole model.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.parallel import GATHERED, Parallel, vocab_position
from dhelix.models.llama.llama_config import LlamaConfig

Rotation = tuple[jax.Array, jax.Array]
Layer = Callable[[Any, Mapping[str, jax.Array]], Any]


# The residuals of a cheap function are as large as its input, and the residuals of all layers stay live until the
# backward pass. To recompute them costs one fused kernel. `prevent_cse` is unnecessary, because XLA cannot undo the
# recomputation across the forward and the backward layer loop. In unrolled layers XLA can undo it, and then the only
# disadvantage is that no memory is saved.
recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x` divided by its root mean square, which is computed in float32, and multiplied by `weight [hidden]`."""

    def normalise(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        return (wide * scale).astype(x.dtype) * weight

    return recomputed(normalise)(x, weight)


def rotation(config: LlamaConfig, positions: jax.Array) -> Rotation:
    """The cosines and sines of the rotary embedding at `positions [seq]`, float32 `[seq, 1, head_dim / 2]` each.

    If `rope_factor` is above 1, Llama 3.1's rule applies. Wavelengths above 8192 tokens, the sequence length of Llama
    3's training, are stretched by the factor. Wavelengths below a quarter of 8192 do not change, and wavelengths
    between both limits are stretched by less than the factor.
    """
    frequency = config.rope_theta ** -(jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if config.rope_factor != 1.0:
        turns = 8192 * frequency / (2 * math.pi)
        keep = jnp.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        frequency = frequency * (keep + (1.0 - keep) / config.rope_factor)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Applies the rotary embedding to `x [batch, seq, heads, head_dim]`.

    Element n of a head's first half and element n of its second half form a pair, which is rotated.
    """
    cos, sin = by
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def resolve_attention(config: DecoderConfig, platform: str) -> Literal["xla", "cudnn"]:
    """The implementation of attention on `platform`. `auto` in the configuration becomes `xla` or `cudnn`.

    Args:
      platform: platform of a device, which may belong to a deviceless topology.
    """
    if config.attention != "auto":
        return config.attention
    half = jnp.dtype(config.dtype) in (jnp.dtype("bfloat16"), jnp.dtype("float16"))
    fits = config.head_dim % 8 == 0 and config.head_dim <= 128
    return "cudnn" if platform in ("gpu", "cuda") and half and fits else "xla"


def query_key_value(
    config: LlamaConfig, parallel: Parallel, weights: Mapping[str, jax.Array], x: jax.Array, by: Rotation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of this device's heads, `[batch, seq, heads or kv_heads, head_dim]`.

    The input `x [batch, seq / tp, hidden]` is normalised first. Query and key have the rotary embedding `by`.
    """
    h = rms_norm(x, weights["attention_norm"], config.norm_eps)
    projections = [weights[name] for name in ("wq", "wk", "wv")]
    products = parallel.gather_matmul("bsh,hnd->bsnd", h, projections)
    return rotate(next(products), by), rotate(next(products), by), next(products)


def causal_attention(
    config: DecoderConfig,
    parallel: Parallel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query self-attention with a causal mask, `[batch, seq / cp, heads, head_dim]`.

    Args:
      query, key, value: of this device's tokens and heads, `[batch, seq / cp, heads or kv_heads, head_dim]`.
      segments: int32 `[batch, seq]`, of whole rows. A token attends only to tokens of its own segment. None: each row
        is one segment.
    """
    implementation = resolve_attention(config, jax.default_backend())
    if parallel.context is not None:
        return parallel.context.attention(query, key, value, segments, implementation)
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation=implementation)


def attention_output(parallel: Parallel, weights: Mapping[str, jax.Array], out: jax.Array) -> jax.Array:
    """The output projection of `out [batch, seq, heads, head_dim]`, which is the output of this device's heads.

    Returns:
      The addend to the residual stream, `[batch, seq / tp, hidden]`.
    """
    out = parallel.split_features(out)
    return parallel.scatter_product(parallel.row_matmul("bsnd,ndh->bsh", out, weights["wo"]))


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
    h = rms_norm(x, weights["ffn_norm"], config.norm_eps)
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


def through_layers(config: DecoderConfig, layer: Layer, state: Any, layers: Any, gathers: bool = False) -> Any:
    """Applies `layer` to `state` for one layer after the other, with rematerialization as `config.remat` says.

    Args:
      layer: function of the state before a layer and the layer's weights. Returns the state after the layer.
      state: the residual stream, with all else that passes from layer to layer.
      layers: the weights of all layers: stacked with `scan_layers`, otherwise a list with one entry per layer.
      gathers: whether layers gather weights (`Parallel.whole_weights`). The backward pass then gathers them again.

    Returns:
      The state after the last layer.
    """
    if config.remat != "none" or gathers:
        policies = jax.checkpoint_policies
        own = {"full": None, "none": policies.save_anything_except_these_names(GATHERED)}
        policy = own[config.remat] if config.remat in own else getattr(policies, config.remat)
        # With scan, forward and backward are two loops, so XLA cannot merge the recomputation with the forward pass.
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=not config.scan_layers)
    if config.scan_layers:
        return jax.lax.scan(lambda state, weights: (layer(state, weights), None), state, layers)[0]
    for weights in layers:
        state = layer(state, weights)
    return state


def embed(config: DecoderConfig, parallel: Parallel, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The residual stream for `tokens [batch, seq]`, from this device's shard `table [vocab / tp, hidden]`.

    Each device looks up the rows that it holds, and takes zeros for all other rows. The results are then summed.
    """
    ends = parallel.ends
    position = vocab_position(ends, tokens, table.shape[0])
    rows = table.at[position].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return ends.to_layers(ends.scatter_rows(rows.astype(config.dtype)))
