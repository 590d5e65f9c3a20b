"""Cross-entropy over a vocabulary that is sharded: full logits never exist, and one logits-sized buffer does.

With `v` running over the vocabulary, `loss = log sum_v exp(logits_v) - logits_target`. Each device reduces
its own shard; three numbers per token are exchanged. The derivative, `softmax(logits) - onehot(target)`, is
written by hand for two reasons: what is kept for it is the logits as they are and one float32 per token, so
that XLA can write the gradient into the logits' own buffer; and no collective has to be transposed, since
each device's gradient needs its own shard alone.
"""

import functools

import jax
import jax.numpy as jnp

from dhelix.models.parallel import Parallel, vocab_position


def _is_target(logits: jax.Array, targets: jax.Array, parallel: Parallel) -> jax.Array:
    """`[batch, seq, vocab / tp]` booleans. Compared and not gathered, so that it fuses into the reduction
    beside it."""
    position = vocab_position(parallel, targets, logits.shape[-1])
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == position[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits: jax.Array, targets: jax.Array, parallel: Parallel) -> jax.Array:
    """Loss per token in nats, float32 `[batch, seq]`, from `logits [batch, seq, vocab / tp]` and `targets
    [batch, seq]`.

    Reductions run in float32 whatever the logits' type.
    """
    return _forward(logits, targets, parallel)[0]


def _forward(logits: jax.Array, targets: jax.Array, parallel: Parallel):
    wide = logits.astype(jnp.float32)
    shift = parallel.max(jnp.max(wide, axis=-1))
    shares = jnp.exp(wide - shift[..., None])
    at_target = jnp.where(_is_target(logits, targets, parallel), wide, 0.0)
    # One reduction of both: apart, XLA puts the second into the backward, whose result then needs a buffer of
    # its own.
    zero = jnp.float32(0)
    sums = jax.lax.reduce((shares, at_target), (zero, zero), _add_pairs, (logits.ndim - 1,))
    total, target_logit = parallel.sum(jnp.stack(sums))
    log_total = jnp.log(total) + shift
    return log_total - target_logit, (logits, targets, log_total)


def _add_pairs(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return a[0] + b[0], a[1] + b[1]


def _backward(parallel: Parallel, kept: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array):
    logits, targets, log_total = kept
    softmax = jnp.exp(logits.astype(jnp.float32) - log_total[..., None])
    gradient = (softmax - _is_target(logits, targets, parallel)) * cotangent[..., None]
    return gradient.astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)
