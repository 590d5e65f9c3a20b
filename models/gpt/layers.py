"""The layers of GPT, Phi-2 and MPT as functions on arrays: LayerNorms, attention, and a feed-forward network with GELU.

`x` is the residual stream `[batch, seq / tp, hidden]` (`common.layers`).

    GPT, MPT     x += attention(norm(x));  x += feed_forward(another norm(x))
    Phi-2        x += attention(h) + feed_forward(h),  h = norm(x)       one gather and one reduce-scatter for both

The bias of a column-parallel product is split as its columns are. The bias of a row-parallel product belongs to the
complete sum, so each device adds it to its own part of the sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
from dhelix.models.gpt.gpt_config import GptConfig

Weights = Mapping[str, jax.Array]


class Order(NamedTuple):
    """What tells attention the order of tokens. Learned positions are in the residual stream, so both are then None.

    Attributes:
      rotation: rotates queries and keys (`turned`).
      slopes: how fast the scores of this device's heads fall with the distance of a key, float32 `[heads / tp]`.
    """

    rotation: Rotation | None = None
    slopes: jax.Array | None = None


def order_of(config: GptConfig, parallel: Parallel, seq: int) -> Order:
    """The order of this device's `seq` tokens, which is the same for all layers."""
    if config.positions == "rotary":
        return Order(
            turned(parallel.positions(seq, jnp.float32), rope_frequencies(config.rope_theta, config.rotary_dim))
        )
    if config.positions == "learned":
        return Order()
    slopes = jnp.asarray(alibi_slopes(config.heads))
    own = config.heads // parallel.sequence_shards()  # the devices that share a sequence also share the heads
    return Order(slopes=jax.lax.dynamic_slice_in_dim(slopes, parallel.shard_index() * own, own))


def alibi_slopes(heads: int) -> np.ndarray:
    """How fast the scores of each head fall with the distance of a key, float32 `[heads]`.

    With n heads and n a power of two, head i = 1, 2, ... has the slope 2^(-8 i / n). For another number of heads, n is
    the next power of two, and MPT takes the slopes with even i first. (ALiBi: arXiv 2108.12409, section 3.)
    """
    n = 1 << (heads - 1).bit_length()
    slopes = (2.0 ** (-8.0 * np.arange(1, n + 1) / n)).astype(np.float32)
    return slopes if n == heads else np.concatenate([slopes[1::2], slopes[::2]])[:heads]


def norm(config: GptConfig, weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """The LayerNorm `name` of `weights`, which has a bias or not."""
    return layer_norm(x, weights[name], weights.get(f"{name}_bias"), config.norm_eps)


def decoder_layer(
    config: GptConfig,
    parallel: Parallel,
    weights: Weights,
    x: jax.Array,
    order: Order,
    segments: jax.Array | None = None,
) -> jax.Array:
    """The residual stream after one layer."""
    h = norm(config, weights, "attention_norm", x)
    names = ("wq", "wk", "wv", *(("w_up",) if config.parallel_block else ()))
    products = columns(parallel, weights, h, names)
    product = attention(config, parallel, weights, products, order, segments)
    if config.parallel_block:
        product = product + feed_forward(config, parallel, weights, next(products))
        return complete(parallel, weights, x, product, ("bo", "b_down"))
    x = complete(parallel, weights, x, product, ("bo",))
    products = columns(parallel, weights, norm(config, weights, "ffn_norm", x), ("w_up",))
    return complete(parallel, weights, x, feed_forward(config, parallel, weights, next(products)), ("b_down",))


def columns(parallel: Parallel, weights: Weights, h: jax.Array, names: Sequence[str]) -> Iterator[jax.Array]:
    """The column-parallel products of `h [batch, seq / tp, hidden]`, with their biases: `[batch, seq, columns / tp]`.

    All products share one gather (`Parallel.gather_matmul`).
    """
    products = parallel.gather_matmul("bsh,hf->bsf", h, [weights[name] for name in names])
    for name, product in zip(names, products, strict=True):
        bias = weights.get(f"b{name[1:]}")
        yield product if bias is None else product + bias


def attention(
    config: GptConfig,
    parallel: Parallel,
    weights: Weights,
    products: Iterator[jax.Array],
    order: Order,
    segments: jax.Array | None,
) -> jax.Array:
    """Attention with this device's heads: the partial sum of its output projection, `[batch, seq, hidden]`.

    Args:
      products: yields query, key and value, `[batch, seq, heads * head_dim / tp]`.
    """
    query = _rotated(config, _heads(config, next(products)), order)
    key = _rotated(config, _heads(config, next(products)), order)
    value = _heads(config, next(products))
    out = causal_attention(config, parallel, query, key, value, segments, order.slopes)
    flat = parallel.split_features(out.reshape(*out.shape[:2], -1))
    return parallel.row_matmul("bsf,fh->bsh", flat, weights["wo"])


def _heads(config: GptConfig, product: jax.Array) -> jax.Array:
    return product.reshape(*product.shape[:2], -1, config.head_dim)


def _rotated(config: GptConfig, heads: jax.Array, order: Order) -> jax.Array:
    if order.rotation is None:
        return heads
    turning, rest = jnp.split(heads, [config.rotary_dim], axis=-1)
    return jnp.concatenate([rotate(turning, order.rotation), rest], axis=-1)


def feed_forward(config: GptConfig, parallel: Parallel, weights: Weights, up: jax.Array) -> jax.Array:
    """GELU and the second matrix: a partial sum `[batch, seq, hidden]`, from `up [batch, seq, ffn / tp]`."""

    @recomputed
    def down(up: jax.Array, w_down: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(up, approximate=config.activation == "gelu_tanh")
        return parallel.row_matmul("bsf,fh->bsh", hidden, w_down)

    return down(up, weights["w_down"])


def complete(
    parallel: Parallel, weights: Weights, x: jax.Array, product: jax.Array, biases: Sequence[str]
) -> jax.Array:
    """`x` plus the sum of all devices' row-parallel products, plus those of `biases` that `weights` has."""
    x = x + parallel.scatter_product(product)
    for name in biases:
        x = x + weights[name] if name in weights else x
    return x
