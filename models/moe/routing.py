"""Which expert computes which token, in which row; and the losses that keep the load balanced.

    logits [T, E] -> the k most likely experts of each token, and their weights (or `sparsemixer`)
                  -> a row of that expert: rows are taken by all first choices in token order, then by all second
                     choices, ... An expert has `capacity` rows; later tokens are dropped.

All shapes are fixed, so nothing depends on how many tokens an expert gets.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dhelix.models.moe.moe_config import MoeConfig

_BLOCK = 128  # entries that are counted by one small product


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where tokens go. T tokens, k choices of each, E experts with C rows.

    Attributes:
      weights: float32 `[T, k]`, the weight of each chosen expert.
      rows: int32 `[T, k]`, the row of each choice among all `E * C`; `E * C` if the token was dropped there.
      choices: int32 `[E * C]`, the choice (`token * k + number`) that has each row; `T * k` for an empty row.
      balance: float32, the load-balancing loss: E times the sum over experts of (fraction of choices) x (mean
        probability). It is 1 for a balanced load. (Switch Transformer, arXiv 2101.03961, equation 4.)
      z: float32, the mean square of the log of the sum of exponentials of the logits (ST-MoE, arXiv 2202.08906,
        equation 5).
      dropped: float32, the fraction of choices that found no row.
    """

    weights: jax.Array
    rows: jax.Array
    choices: jax.Array
    balance: jax.Array
    z: jax.Array
    dropped: jax.Array


def route(config: MoeConfig, logits: jax.Array) -> Routing:
    """Routes the tokens of one device by `logits`, float32 `[T, E]`.

    Raises:
      ValueError: an expert has room for less than one token.
    """
    tokens, experts = logits.shape
    capacity, k = config.capacity(tokens), config.chosen
    probabilities = jax.nn.softmax(logits, axis=-1)
    if config.routing == "sparsemixer":
        weights, chosen = sparsemixer(logits, k, config.jitter)
    else:
        weights, chosen = jax.lax.top_k(probabilities, k)
        if config.normalise:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    by_choice = chosen.T.reshape(-1)  # first choices of all tokens come first
    taken = jax.nn.one_hot(by_choice, experts, dtype=jnp.bfloat16)
    place = jnp.sum(_counts_before(taken) * taken, axis=-1).astype(jnp.int32)
    rows = jnp.where(place < capacity, by_choice * capacity + place, experts * capacity)
    rows = rows.reshape(k, tokens).T
    numbers = jnp.arange(tokens * k, dtype=jnp.int32).reshape(tokens, k)
    choices = jnp.full(experts * capacity, tokens * k, jnp.int32).at[rows].set(numbers, mode="drop")
    share = jnp.mean(taken.astype(jnp.float32), axis=0)
    balance = experts * jnp.sum(jax.lax.stop_gradient(share) * jnp.mean(probabilities, axis=0))
    z = jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    dropped = jnp.mean((rows == experts * capacity).astype(jnp.float32))
    return Routing(weights, rows, choices, balance, z, jax.lax.stop_gradient(dropped))


def sparsemixer(logits: jax.Array, k: int, jitter: float) -> tuple[jax.Array, jax.Array]:
    """The experts of Phi-3.5-MoE: the best ones, each with a weight of its own softmax (arXiv 2409.12136).

    An expert's weight is its part of a softmax over the experts that no earlier choice took. Experts count only if
    their distance to the best logit is at most `2 * jitter`, relative to the larger of both. So a clear choice has
    weight 1. This is the published model's inference. Its training also draws experts at random, disturbs the logits,
    and corrects the gradient for that (SparseMixer-v2). These are left out here: the choice is deterministic, and the
    gradient is that of the weights.

    Args:
      logits: float32 `[T, E]`.
      k: the number of choices.

    Returns:
      Weights, float32 `[T, k]`, and experts, int32 `[T, k]`.
    """
    left, weights, chosen = logits, [], []
    for _ in range(k):
        best = jnp.max(left, axis=-1, keepdims=True)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter
        gates = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
        chosen.append(jnp.argmax(left, axis=-1))
        weights.append(jnp.take_along_axis(gates, chosen[-1][:, None], axis=-1)[:, 0])
        left = jnp.where(jax.nn.one_hot(chosen[-1], logits.shape[-1], dtype=bool), -jnp.inf, left)
    return jnp.stack(weights, axis=-1), jnp.stack(chosen, axis=-1)


def _counts_before(taken: jax.Array) -> jax.Array:
    """For each entry of `taken [N, E]`, zeros and ones, the number of ones before it in its column; float32.

    A running sum over all entries would be many dependent kernels on GPUs. So it is a product with a triangle in each
    block, and a short running sum over blocks. Both are exact: a block holds at most 128 ones.
    """
    entries, experts = taken.shape
    padded = jnp.pad(taken, ((0, -entries % _BLOCK), (0, 0))).reshape(-1, _BLOCK, experts)
    triangle = jnp.tril(jnp.ones((_BLOCK, _BLOCK), taken.dtype), -1)
    inside = jnp.einsum("ij,bje->bie", triangle, padded, preferred_element_type=jnp.float32)
    totals = jnp.sum(padded, axis=1, dtype=jnp.float32)
    before = jnp.cumsum(totals, axis=0) - totals
    return (inside + before[:, None]).reshape(-1, experts)[:entries]
