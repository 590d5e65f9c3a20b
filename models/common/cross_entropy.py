"""Cross-entropy over a sharded vocabulary. No device holds all logits, and only one buffer has the size of a shard.

The loss of a token is `log sum_v exp(logits_v) - logits_target`, where `v` runs over the vocabulary. Each device
reduces its own shard, and the devices exchange three numbers per token. With a z-loss, the square of the log of the
sum is added with a small weight, so that logits do not drift.

The derivative, `softmax(logits) - onehot(target)`, is written by hand for two reasons. First, the backward pass then
needs only the logits and one float32 number per token, so XLA can write the gradient into the buffer of the logits.
Second, no collective has to be transposed, because each device's gradient needs only its own shard.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dhelix.models.common.parallel import SINGLE_DEVICE, Parallel, vocab_position
from dhelix.models.common.training import Metrics, Params


def _is_target(logits: jax.Array, targets: jax.Array, parallel: Parallel) -> jax.Array:
    """Whether each logit is the logit of the target: `[batch, seq, vocab / tp]` booleans.

    They are computed by a comparison, because a comparison fuses into the reduction that uses it. A gather would not
    fuse.
    """
    position = vocab_position(parallel, targets, logits.shape[-1])
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == position[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(logits: jax.Array, targets: jax.Array, parallel: Parallel, z_loss: float = 0.0) -> jax.Array:
    """The loss of each token in nats. Reductions run in float32 for any type of logits.

    Args:
      logits: `[batch, seq, vocab / tp]`.
      targets: integer token ids, `[batch, seq]`.
      z_loss: weight of the z-loss.

    Returns:
      The losses, float32 `[batch, seq]`.
    """
    return _forward(logits, targets, parallel, z_loss)[0]


def _forward(logits: jax.Array, targets: jax.Array, parallel: Parallel, z_loss: float):
    wide = logits.astype(jnp.float32)
    shift = parallel.max(jnp.max(wide, axis=-1))
    shares = jnp.exp(wide - shift[..., None])
    at_target = jnp.where(_is_target(logits, targets, parallel), wide, 0.0)
    # One reduction computes both sums. If there were two reductions, XLA would move the second one into the backward
    # pass, and the gradient would need a buffer of its own.
    zero = jnp.float32(0)
    sums = jax.lax.reduce((shares, at_target), (zero, zero), _add_pairs, (logits.ndim - 1,))
    total, target_logit = parallel.sum(jnp.stack(sums))
    log_total = jnp.log(total) + shift
    losses = log_total - target_logit
    return losses + z_loss * jnp.square(log_total) if z_loss else losses, (logits, targets, log_total)


def _add_pairs(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return a[0] + b[0], a[1] + b[1]


def _backward(parallel: Parallel, z_loss: float, kept: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array):
    logits, targets, log_total = kept
    softmax = jnp.exp(logits.astype(jnp.float32) - log_total[..., None])
    if z_loss:
        softmax *= 1.0 + 2.0 * z_loss * log_total[..., None]
    gradient = (softmax - _is_target(logits, targets, parallel)) * cotangent[..., None]
    return gradient.astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)


def mean_loss(
    logits: jax.Array,
    targets: jax.Array,
    parallel: Parallel,
    weights: jax.Array | None = None,
    z_loss: float = 0.0,
) -> jax.Array:
    """The mean loss of this device's tokens in nats, float32.

    Args:
      logits, targets: see `cross_entropy`.
      weights: float32 `[batch, seq]`, the weights of tokens in the mean. Their mean over all devices is 1. None: all
        are 1.
      z_loss: weight of the z-loss.
    """
    losses: jax.Array = cross_entropy(logits, targets, parallel, z_loss)  # type: ignore
    return jnp.mean(losses if weights is None else losses * weights)


def loss_alone(logits: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Metrics]]:
    """The `objective` (`models.families`) of a family whose only metric is the loss.

    Args:
      logits: function of config, params, tokens, parallel and segments, as `llama.logits`.
    """

    def objective(
        config: Any,
        params: Params,
        tokens: jax.Array,
        targets: jax.Array,
        parallel: Parallel = SINGLE_DEVICE,
        segments: jax.Array | None = None,
        weights: jax.Array | None = None,
    ) -> tuple[jax.Array, Metrics]:
        found = logits(config, params, tokens, parallel, segments)
        value = mean_loss(found, targets, parallel.ends, weights, config.z_loss)
        return value, {"loss": value}

    return objective
