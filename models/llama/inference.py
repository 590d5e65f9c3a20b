"""Inference with a stack of Llama layers. Prefill fills a cache of keys and values; decode adds one token at a time.

    x [batch, seq, hidden]     -prefill_layers->   x, Cache of seq tokens
    x [batch, 1, hidden]       -decode_layers-->   x, Cache of one token more            again and again

Inference uses the same layers as training (`layers.py`). Under `shard_map` over `tp`, `parallel` is a `TensorParallel`:
each device holds the whole residual stream. The heads and the feed-forward's hidden layer are split over devices. Each
layer has two all-reduces, one after attention and one after the feed-forward. With `collective_matmuls`, each
all-reduce is fused with the matmul before it (DistFuse, section 3.3).

The output is column-parallel. With `whole_logits`, an all-gather follows, so every device can choose the next token.
The embedding is split over the vocabulary as in training, or over its columns (`column_embedding_specs`). In the second
case, a device looks up its columns of all tokens, and an all-gather follows (DistFuse, figure 1).

The cache has room for `capacity` tokens of each sequence, and holds `length` tokens of each. In memory, the keys of one
head are contiguous, so the matmul of a library can read them in place.

Inference is faster with `scan_layers=False`. Decode mostly reads weights and the cache. In a loop over stacked layers,
XLA copies each layer's part of the cache out of the stack and back into it. XLA also copies weights that are read by a
kernel or by several matmuls.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dhelix.models.common.layers import causal_attention, embed
from dhelix.models.common.parallel import SINGLE_DEVICE, Parallel
from dhelix.models.llama.layers import attention_output, feed_forward_block, query_key_value, rotation
from dhelix.models.llama.llama_config import LlamaConfig
from dhelix.models.llama.model import Params, param_specs, project

KeysValues = tuple[jax.Array, jax.Array]
Layer = Callable[[dict[str, jax.Array], jax.Array, Any], tuple[jax.Array, KeysValues]]


class Cache(NamedTuple):
    """The keys and values of all tokens so far, for the heads of this device. Shapes or specs may replace the arrays.

    Attributes:
      layers: a pair of keys and values with a leading layer dimension. With `scan_layers=False`, a list with one pair
        for each layer. The arrays of a layer are `[batch, kv_heads / tp, capacity, head_dim]` in the compute dtype.
      length: number of tokens of each sequence, an int32 scalar.
    """

    layers: Any
    length: Any


def cache_specs(config: LlamaConfig) -> Cache:
    """The `PartitionSpec`s of a cache over mesh axis `tp`."""
    if config.scan_layers:
        stacked = PartitionSpec(None, None, "tp")
        return Cache((stacked, stacked), PartitionSpec())
    spec = PartitionSpec(None, "tp")
    return Cache([(spec, spec)] * config.layers, PartitionSpec())


def cache_shapes(config: LlamaConfig, batch: int, capacity: int) -> Cache:
    """The shapes and types of the global arrays of a cache, before they are split over `tp`."""
    leading = (config.layers,) if config.scan_layers else ()
    shape = (*leading, batch, config.kv_heads, capacity, config.head_dim)
    pair = (jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype)),) * 2
    return Cache(pair if config.scan_layers else [pair] * config.layers, jax.ShapeDtypeStruct((), jnp.int32))


def column_embedding_specs(config: LlamaConfig) -> Params:
    """`llama.param_specs` with the embedding split over its columns, `[vocab, hidden / tp]` on each device.

    Raises:
      ValueError: the embedding is also the output's matrix, which is split over the vocabulary.
    """
    if config.tie_embeddings:
        raise ValueError(
            "a tied embedding is split over the vocabulary; take llama.param_specs, or tie_embeddings=False"
        )
    return {**param_specs(config), "embedding": PartitionSpec(None, "tp")}


def prefill(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    capacity: int,
    parallel: Parallel = SINGLE_DEVICE,
    whole_logits: bool = False,
) -> tuple[jax.Array, Cache]:
    """Reads prompts of equal length, and returns the logits of the next token and the cache.

    Args:
      params: parameters in the compute dtype; under `shard_map`, this device's shards (`llama.param_specs` or
        `column_embedding_specs`).
      tokens: int32 `[batch, seq]`.
      capacity: number of tokens of each sequence for which the cache has room; at least seq.
      parallel: a `TensorParallel` under `shard_map`.
      whole_logits: whether each device gets the logits of the whole vocabulary, by an all-gather. Otherwise it gets
        those of its shard.

    Returns:
      The logits of the token after the prompts, `[batch, vocab / tp]` or `[batch, vocab]`, and the cache.

    Raises:
      ValueError: `capacity` is below seq.
    """
    x = _embedded(config, parallel, params["embedding"], tokens)
    x, cache = prefill_layers(config, params["layers"], x, capacity, parallel)
    return _next_logits(config, params, x[:, -1:], parallel, whole_logits), cache


def decode(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    cache: Cache,
    parallel: Parallel = SINGLE_DEVICE,
    whole_logits: bool = False,
) -> tuple[jax.Array, Cache]:
    """Reads one more token of each sequence, and returns the logits of the next token and the longer cache.

    The cache must have room for the token. Otherwise the token overwrites the last token in the cache. Donate the cache
    to update it in place.

    Args:
      params, parallel, whole_logits: as in `prefill`.
      tokens: int32 `[batch]`.
    """
    x = _embedded(config, parallel, params["embedding"], tokens[:, None])
    x, cache = decode_layers(config, params["layers"], x, cache, parallel)
    return _next_logits(config, params, x, parallel, whole_logits), cache


def _embedded(config: LlamaConfig, parallel: Parallel, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The residual stream for `tokens [batch, seq]`. The shape of `table` says whether its columns are split."""
    if table.shape[1] == config.hidden:
        return embed(config, parallel, table, tokens)
    return parallel.gather_features(embed(config, SINGLE_DEVICE, table, tokens))  # all rows are here


def _next_logits(config: LlamaConfig, params: Params, x: jax.Array, parallel: Parallel, whole: bool) -> jax.Array:
    """The logits of the next token, from the last layer's output for the last token, `x [batch, 1, hidden]`."""
    logits = project(config, params, x, parallel)
    return (parallel.gather_features(logits) if whole else logits)[:, 0]


def prefill_layers(
    config: LlamaConfig, layers: Any, x: jax.Array, capacity: int, parallel: Parallel = SINGLE_DEVICE
) -> tuple[jax.Array, Cache]:
    """Applies all layers to `x [batch, seq, hidden]` with causal attention. Returns their output and the cache.

    Args:
      layers: the parameters of the layers, as in `llama.Params`.

    Raises:
      ValueError: `capacity` is below seq.
    """
    seq = x.shape[1]
    if seq > capacity:
        raise ValueError(f"the cache has room for {capacity} tokens, but there are {seq}; give more capacity")
    by = rotation(config, jnp.arange(seq))

    def layer(weights: dict[str, jax.Array], x: jax.Array, _: None) -> tuple[jax.Array, KeysValues]:
        query, key, value = query_key_value(config, parallel, weights, x, by)
        x += attention_output(parallel, weights, causal_attention(config, parallel, query, key, value))
        return x + feed_forward_block(config, parallel, weights, x), (_to_cache(key), _to_cache(value))

    def _to_cache(heads: jax.Array) -> jax.Array:
        return jnp.pad(heads.swapaxes(1, 2), ((0, 0), (0, 0), (0, capacity - seq), (0, 0)))

    x, filled = _over_layers(config, layer, layers, x, None)
    return x, Cache(filled, jnp.int32(seq))


def decode_layers(
    config: LlamaConfig, layers: Any, x: jax.Array, cache: Cache, parallel: Parallel = SINGLE_DEVICE
) -> tuple[jax.Array, Cache]:
    """Applies all layers to one token of each sequence, `x [batch, 1, hidden]`. Returns their output and the cache.

    The token attends to the tokens in the cache and to itself.
    """
    by = rotation(config, cache.length[None])

    def layer(weights: dict[str, jax.Array], x: jax.Array, cached: KeysValues) -> tuple[jax.Array, KeysValues]:
        query, key, value = query_key_value(config, parallel, weights, x, by)
        keys, values = (_with_token(old, new, cache.length) for old, new in zip(cached, (key, value), strict=True))
        x += attention_output(parallel, weights, cached_attention(query, keys, values, cache.length))
        return x + feed_forward_block(config, parallel, weights, x), (keys, values)

    x, filled = _over_layers(config, layer, layers, x, cache.layers)
    return x, Cache(filled, cache.length + 1)


def _with_token(cached: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    """`cached [batch, heads, capacity, head_dim]` after writing `new [batch, 1, heads, head_dim]` at `position`."""
    return jax.lax.dynamic_update_slice_in_dim(cached, new.swapaxes(1, 2), position, axis=2)


def cached_attention(query: jax.Array, keys: jax.Array, values: jax.Array, last: jax.Array) -> jax.Array:
    """Grouped-query attention of one token of each sequence to the cached tokens up to position `last`.

    The softmax is computed in float32.

    Args:
      query: `[batch, 1, heads, head_dim]`.
      keys, values: `[batch, kv_heads, capacity, head_dim]`.
      last: int32 scalar.

    Returns:
      The output of each head, `[batch, 1, heads, head_dim]`.
    """
    batch, _, heads, head_dim = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, head_dim)
    scores = jnp.einsum("bkgd,bktd->bkgt", grouped, keys, preferred_element_type=jnp.float32)
    seen = jnp.arange(keys.shape[2]) <= last
    weights = jax.nn.softmax(jnp.where(seen, scores / math.sqrt(head_dim), -jnp.inf), axis=-1)
    out = jnp.einsum("bkgt,bktd->bkgd", weights.astype(values.dtype), values)
    return out.reshape(batch, 1, heads, head_dim)


def _over_layers(config: LlamaConfig, layer: Layer, layers: Any, x: jax.Array, cached: Any) -> tuple[jax.Array, Any]:
    """The output of the last layer for the input `x`, and the keys and values of each layer."""
    if config.scan_layers:
        return jax.lax.scan(lambda x, of_layer: layer(of_layer[0], x, of_layer[1]), x, (layers, cached))
    filled, layer = [], jax.jit(layer)  # under jit, a layer is traced and lowered once; XLA inlines it
    for weights, of_layer in zip(layers, cached or [None] * len(layers), strict=True):
        x, pair = layer(weights, x, of_layer)
        filled.append(pair)
    return x, filled
