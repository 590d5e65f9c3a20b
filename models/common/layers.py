"""What the layers of all decoders share, as functions on arrays: the embedding, attention, and the loop over layers.

`x` is the residual stream `[batch, seq / tp, hidden]`, which is sequence-parallel between blocks. A block (attention or
feed-forward) gathers the sequence. It multiplies the sequence with this device's shard of the heads or of the hidden
layer, and reduce-scatters the sum. This is Megatron's tensor and sequence parallelism. On a single device, the gather
and the reduce-scatter do nothing, and the same code computes the whole model.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dhelix.models.common.attention_blocks import Block, attention, linear_bias
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.parallel import GATHERED, AutoParallel, Parallel, vocab_position
from dhelix.models.common.training import Params

Rotation = tuple[jax.Array, jax.Array]
Layer = Callable[[Any, Mapping[str, jax.Array]], Any]


# The residuals of a cheap function are as large as its input, and the residuals of all layers stay live until the
# backward pass. To recompute them costs one fused kernel. `prevent_cse` is unnecessary, because XLA cannot undo the
# recomputation across the forward and the backward layer loop. In unrolled layers XLA can undo it, and then the only
# disadvantage is that no memory is saved.
recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """`x` minus its mean, divided by its standard deviation, times `weight [hidden]`, plus `bias [hidden]`.

    It is computed in float32.
    """

    def normalise(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
        scaled = centred * scale * weight.astype(jnp.float32)
        return (scaled if bias is None else scaled + bias.astype(jnp.float32)).astype(x.dtype)

    return recomputed(normalise)(x, weight, bias)


def rope_frequencies(theta: float, size: int) -> jax.Array:
    """The angle per position of each pair of a rotary embedding of `size` elements, float32 `[size / 2]`."""
    return theta ** -(jnp.arange(0, size, 2, dtype=jnp.float32) / size)


def turned(positions: jax.Array, frequency: jax.Array) -> Rotation:
    """The cosines and sines of a rotary embedding at `positions [seq]`, float32 `[seq, 1, pairs]` each."""
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


def causal_attention(
    config: DecoderConfig,
    parallel: Parallel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
    slopes: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query self-attention with a causal mask, `[batch, seq / cp, heads, head_dim]`.

    Args:
      query, key, value: of this device's tokens and heads, `[batch, seq / cp, heads or kv_heads, head_dim]`.
      segments: int32 `[batch, seq]`, of whole rows. A token attends only to tokens of its own segment. None: each row
        is one segment.
      slopes: ALiBi's slopes of this device's heads, float32 `[heads]`. None: scores do not depend on distances.
    """
    implementation = resolve_attention(config, jax.default_backend())
    if parallel.context is not None:
        return parallel.context.attention(query, key, value, segments, implementation, slopes)
    mask = None if segments is None else segments[:, :, None] == segments[:, None, :]
    if slopes is not None and not isinstance(parallel, AutoParallel):
        return attention(Block(True, implementation), query, key, value, mask, slopes)
    own = jnp.arange(query.shape[1])[None]
    bias = None if slopes is None else linear_bias(slopes, own, own, query.dtype)
    mask = None if mask is None else mask[:, None]
    return jax.nn.dot_product_attention(query, key, value, bias, mask, is_causal=True, implementation=implementation)


def through_model(
    config: DecoderConfig,
    parallel: Parallel,
    params: Params,
    tokens: jax.Array,
    layer: Layer,
    start: Callable[[jax.Array], Any] = lambda x: x,
) -> tuple[Any, Mapping[str, jax.Array]]:
    """The embedding and all layers of a decoder.

    Args:
      params: in the compute dtype; under `shard_map`, this device's shards.
      tokens: int32 `[batch, seq / cp]`.
      layer: see `through_layers`.
      start: makes the state before the first layer from the embedding's residual stream.

    Returns:
      The state after the last layer, and the parameters outside of the layers, for the head.
    """
    ends = parallel.whole_weights({name: weight for name, weight in params.items() if name != "layers"})
    x = embed(config, parallel, ends["embedding"], tokens, ends.get("positions"))
    return through_layers(config, parallel, layer, start(x), params["layers"]), ends


def through_layers(config: DecoderConfig, parallel: Parallel, layer: Layer, state: Any, layers: Any) -> Any:
    """Applies `layer` to `state` for one layer after the other, with rematerialization as `config.remat` says.

    Args:
      layer: function of the state before a layer and the layer's weights. Returns the state after the layer.
      state: the residual stream, with all else that passes from layer to layer.
      layers: the weights of all layers: stacked with `scan_layers`, otherwise a list with one entry per layer. If they
        are split over replicas, a layer gathers them, and the backward pass gathers them again.

    Returns:
      The state after the last layer.
    """

    def whole(state: Any, weights: Mapping[str, jax.Array]) -> Any:
        return layer(state, parallel.whole_weights(weights))

    if config.remat != "none" or parallel.gathers_weights:
        policies = jax.checkpoint_policies
        own = {"full": None, "none": policies.save_anything_except_these_names(GATHERED)}
        policy = own[config.remat] if config.remat in own else getattr(policies, config.remat)
        # With scan, forward and backward are two loops, so XLA cannot merge the recomputation with the forward pass.
        whole = jax.checkpoint(whole, policy=policy, prevent_cse=not config.scan_layers)
    if config.scan_layers:
        return jax.lax.scan(lambda state, weights: (whole(state, weights), None), state, layers)[0]
    for weights in layers:
        state = whole(state, weights)
    return state


def embed(
    config: DecoderConfig,
    parallel: Parallel,
    table: jax.Array,
    tokens: jax.Array,
    positions: jax.Array | None = None,
) -> jax.Array:
    """The residual stream for `tokens [batch, seq / cp]`, from this device's shard `table [vocab / tp, hidden]`.

    Each device looks up the rows that it holds, and takes zeros for all other rows. The results are then summed.

    Args:
      positions: this device's shard of a table of learned positions, `[positions / tp, hidden]`. The rows of the
        tokens' positions are added. None: nothing is added.
    """
    ends = parallel.ends
    rows = _rows(ends, table, tokens)
    if positions is not None and ends.holds_shards:
        rows = rows + _rows(ends, positions, parallel.positions(tokens.shape[1]))
    elif positions is not None:
        # With a look-up in place of this slice, XLA's partitioner would abort in a pipeline.
        rows = rows + positions[: tokens.shape[1]]
    return ends.to_layers(ends.scatter_rows(rows.astype(config.dtype)))


def _rows(ends: Parallel, table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows `ids` of a table, of which this device has the shard `table`. Rows of other shards are zeros."""
    position = vocab_position(ends, ids, table.shape[0])
    return table.at[position].get(mode="fill", fill_value=0, wrap_negative_indices=False)
