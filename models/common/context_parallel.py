"""Context parallelism: each device has a part of every sequence, also within attention.

A sequence is cut into 2 n chunks, where n is the number of devices of a `cp` group. Device d has chunk d and chunk
2 n - 1 - d (zigzag), so that all devices have equal work under a causal mask. Attention takes n steps:

    step 0        own keys: causal attention over the device's two chunks
    step t > 0    keys of device j = d - t (mod n), which are two chunks:
                    j < d    both query chunks see the first chunk of j in full, and nothing of the second
                    j > d    the second query chunk sees both chunks of j in full, and the first sees nothing
                  In both cases, the step has two pairs of chunks without a mask, which are one call of the kernel.

The steps are merged by their log-sums: with l = log(sum of exp(l_t)), the output is the sum of out_t exp(l_t - l). The
backward pass takes the same steps. Each gives its addends to the gradients with the whole attention's l
(`attention_blocks`).

The keys arrive in one of three ways:

    "ring"          a device sends its keys and values on to the next device in each step; it needs those of a step only
                    for that step. The gradients of keys and values go straight home.
    "scanned-ring"  as "ring", but steps 2 to n - 2 are one loop, so the program does not grow with n. A loop's messages
                    go over one distance only. So the gradients of keys and values travel on with them, as sums in
                    float32, and go home after step n - 1.
    "all-gather"    a device gathers all keys and values before step 1. A reduce-scatter sums their gradients.

Both rings add the same numbers in the same order. A step needs only messages of earlier steps for its attention, so
messages and attention can overlap.

Ring attention: Liu et al., arXiv 2310.01889; zigzag: Brandon et al., arXiv 2311.09431 ("striped", there by tokens).
DHelix section 6.2.2 (arXiv 2411.15871) uses Megatron's form of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from dhelix.models.common.attention_blocks import Block, Implementation, backward, forward, linear_bias

Exchange = Literal["ring", "scanned-ring", "all-gather"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
Pair = tuple[jax.Array, jax.Array]
Addends = Pair | tuple[()]
Step = Callable[[jax.Array, Pair, Any], tuple[Any, Addends]]


@dataclasses.dataclass(frozen=True)
class Context:
    """How the devices of a group share sequences, under `shard_map` over `axis`.

    Attributes:
      size: the number of devices of a group, at least 2.
      exchange: how keys and values travel.
      axis: the mesh axis.
    """

    size: int
    exchange: Exchange = "ring"
    axis: str = "cp"

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ValueError(f"context={self.exchange!r} is unknown; use 'ring', 'scanned-ring' or 'all-gather'")

    def own_part(self, x: jax.Array) -> jax.Array:
        """This device's two chunks of whole rows `x [batch, seq]`: `[batch, seq / cp]`."""
        return self._part(x, lax.axis_index(self.axis))

    def positions(self, seq: int, device: jax.Array | None = None) -> jax.Array:
        """The positions in the whole sequence of the `seq` tokens of `device`, or of this device. int32 `[seq]`."""
        chunk, device = seq // 2, lax.axis_index(self.axis) if device is None else device
        first, second = device * chunk, (2 * self.size - 1 - device) * chunk
        return jnp.concatenate([first + jnp.arange(chunk), second + jnp.arange(chunk)])

    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: jax.Array | None,
        implementation: Implementation,
        slopes: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention of this device's queries to all keys of their rows.

        Args:
          query: `[batch, seq / cp, heads, head_dim]`.
          key, value: `[batch, seq / cp, kv_heads, head_dim]`.
          segments: int32 `[batch, seq]`, of whole rows. A token attends only to tokens of its own segment.
          slopes: ALiBi's slopes of this device's heads, float32 `[heads]`. None: scores do not depend on distances.

        Returns:
          The output, like `query`.
        """
        return _attention(self, implementation, query, key, value, segments, slopes)

    def take_steps(self, step: Step, own: Pair, state: Any) -> tuple[Any, Addends]:
        """Takes steps 1, 2, ..., which use the keys and values of one other device each.

        Args:
          step: maps the device that the keys and values come from, the keys and values, and the state to the next
            state. Its second result are the step's addends to the gradients of these keys and values, in the compute
            type. It is () if there are no gradients.
          own: this device's keys and values.
          state: the state before step 1.

        Returns:
          The state after the last step; and the sums, float32, of all other devices' addends to the gradients of `own`.
        """
        if self.exchange == "scanned-ring" and self.size > 3:
            return self._scan(step, own, state)
        others = []
        for number, block in enumerate(self._arriving(own), 1):
            state, addends = step(self._source(number), block, state)
            others.append(addends)
        return state, self._sent_home(others)

    def _scan(self, step: Step, own: Pair, state: Any) -> tuple[Any, Addends]:
        """`take_steps` with a loop. The first step has no sums to send yet, and the last one no keys and values."""

        def add(number: jax.Array | int, block: Pair, state: Any, sums: Addends) -> tuple[Any, Addends]:
            state, addends = step(self._source(number), block, state)
            return state, jax.tree.map(jnp.add, sums, addends)

        def middle(number: jax.Array, carry: tuple[Pair, Any, Addends]) -> tuple[Pair, Any, Addends]:
            block, state, sums = carry
            following, sums = self._shifted((block, sums))
            return following, *add(number, block, state, sums)

        block = self._shifted(own)
        following = self._shifted(block)
        state, addends = step(self._source(1), block, state)
        carry = following, state, jax.tree.map(_wide, addends)
        block, state, sums = lax.fori_loop(2, self.size - 1, middle, carry)
        state, sums = add(self.size - 1, block, state, self._shifted(sums))
        return state, self._shifted(sums)

    def _source(self, step: jax.Array | int) -> jax.Array:
        """The device whose keys a step uses."""
        return (lax.axis_index(self.axis) - step) % self.size

    def _shifted[T](self, x: T, distance: int = 1) -> T:
        """`x` of the device that is `distance` before this one in the ring."""
        return lax.ppermute(x, self.axis, [(device, (device + distance) % self.size) for device in range(self.size)])

    def _arriving(self, own: Pair) -> Iterator[Pair]:
        """The keys and values of steps 1, 2, ..."""
        every = lax.all_gather(own, self.axis) if self.exchange == "all-gather" else None
        for step in range(1, self.size):
            if every is None:
                own = self._shifted(own)
                yield own
            else:
                yield jax.tree.map(functools.partial(_at, index=self._source(step)), every)

    def _sent_home(self, others: list[Addends]) -> Addends:
        """The sums of the addends that all other devices have for this one. `others` are those of steps 1, 2, ..."""
        if self.exchange != "all-gather":
            arrived = (self._shifted(addends, -step) for step, addends in enumerate(others, 1))
            return functools.reduce(functools.partial(jax.tree.map, jnp.add), (jax.tree.map(_wide, x) for x in arrived))
        every = jax.tree.map(lambda addend: jnp.zeros((self.size, *addend.shape), addend.dtype), others[0])
        for step, addends in enumerate(others, 1):
            put = functools.partial(lax.dynamic_update_index_in_dim, index=self._source(step), axis=0)
            every = jax.tree.map(put, every, addends)
        return jax.tree.map(_wide, lax.psum_scatter(every, self.axis))

    def mask(
        self, segments: jax.Array | None, pairs: "_Pairs | None" = None, source: jax.Array | int = 0
    ) -> jax.Array | None:
        """Which keys a step's queries see, booleans `[batch, queries, keys]`; None if they see all of them."""
        if segments is None:
            return None
        queries = self.own_part(segments)
        if pairs is None:
            return queries[:, :, None] == queries[:, None, :]
        return pairs.queries(queries)[:, :, None] == pairs.keys(self._part(segments, source))[:, None, :]

    def bias(
        self, slopes: jax.Array | None, query: jax.Array, pairs: "_Pairs | None" = None, source: jax.Array | int = 0
    ) -> jax.Array | None:
        """The addends of `slopes` to a step's scores, `[batch or 1, heads, queries, keys]`. Arguments as for `mask`."""
        if slopes is None:
            return None
        own = self.positions(query.shape[1])[None]
        if pairs is None:
            return linear_bias(slopes, own, own, query.dtype)
        keys = pairs.keys(self.positions(query.shape[1], jnp.asarray(source))[None])
        return jnp.repeat(linear_bias(slopes, pairs.queries(own), keys, query.dtype), query.shape[0], axis=0)

    def _part(self, x: jax.Array, device: jax.Array | int) -> jax.Array:
        chunks = x.reshape(x.shape[0], 2 * self.size, -1).swapaxes(0, 1)
        return jnp.concatenate([_at(chunks, index=device), _at(chunks, index=2 * self.size - 1 - device)], axis=1)


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """The two pairs of chunks of a step, stacked along the batch.

    Attributes:
      before: whether the keys come from a device with a smaller number, bool.
    """

    before: jax.Array

    def queries(self, x: jax.Array) -> jax.Array:
        """`[batch, seq, ...]` of this device as `[2 batch, seq / 2, ...]`: the queries of both pairs."""
        first, second = jnp.split(x, 2, axis=1)
        return jnp.concatenate([jnp.where(self.before, first, second), second])

    def keys(self, x: jax.Array) -> jax.Array:
        """As `queries`, for keys or values of the other device."""
        first, second = jnp.split(x, 2, axis=1)
        return jnp.concatenate([first, jnp.where(self.before, first, second)])

    def log_sums(self, x: jax.Array) -> jax.Array:
        """As `queries`, for log-sums `[batch, heads, seq]`."""
        return self.queries(x.swapaxes(1, 2)).swapaxes(1, 2)

    def to_queries(self, x: jax.Array, nothing: float = 0.0) -> list[jax.Array]:
        """The pairs' results `[2 batch, seq / 2, ...]` as addends `[batch, seq, ...]` of this device.

        Where a pair adds nothing, the addend is `nothing`.
        """
        one, two = jnp.split(x, 2)
        empty = jnp.full_like(one, nothing)
        first, second = jnp.where(self.before, one, empty), jnp.where(self.before, empty, one)
        return [jnp.concatenate([first, two], axis=1), jnp.concatenate([empty, second], axis=1)]

    def to_keys(self, x: jax.Array) -> jax.Array:
        """The pairs' results as the sum of addends for the other device's keys."""
        one, two = jnp.split(x, 2)
        zero = jnp.zeros_like(two)
        return jnp.concatenate([one + jnp.where(self.before, two, zero), jnp.where(self.before, zero, two)], axis=1)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _at(x: jax.Array, index: jax.Array | int) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    context: Context,
    implementation: Implementation,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    slopes: jax.Array | None,
) -> jax.Array:
    return _forward(context, implementation, query, key, value, segments, slopes)[0]


def _forward(
    context: Context,
    implementation: Implementation,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    slopes: jax.Array | None,
):
    def step(source: jax.Array, block: Pair, so_far: Pair) -> tuple[Pair, tuple[()]]:
        pairs = _Pairs(source < lax.axis_index(context.axis))
        keys, values = map(pairs.keys, block)
        mask, bias = context.mask(segments, pairs, source), context.bias(slopes, query, pairs, source)
        more = forward(Block(False, implementation), pairs.queries(query), keys, values, mask, bias)
        return _merged(*so_far, pairs, *more), ()

    mask, bias = context.mask(segments), context.bias(slopes, query)
    out, log_sums = forward(Block(True, implementation), query, key, value, mask, bias)
    (out, log_sums), _ = context.take_steps(step, (key, value), (_wide(out), log_sums))
    out = out.astype(query.dtype)
    return out, (query, key, value, segments, slopes, out, log_sums)


def _merged(out: jax.Array, log_sums: jax.Array, pairs: _Pairs, more: jax.Array, more_sums: jax.Array) -> Pair:
    """`out` and `log_sums` after another step, whose pairs have the results `more` and `more_sums`."""
    steps = [sums.swapaxes(1, 2) for sums in pairs.to_queries(more_sums.swapaxes(1, 2), -jnp.inf)]
    total = functools.reduce(jnp.logaddexp, steps, log_sums)

    def share(sums: jax.Array) -> jax.Array:
        return jnp.exp(sums - total).swapaxes(1, 2)[..., None]

    addends = zip(pairs.to_queries(more), steps, strict=True)
    return out * share(log_sums) + sum(each * share(sums) for each, sums in addends), total


def _backward(context: Context, implementation: Implementation, kept: tuple, cotangent: jax.Array):
    query, key, value, segments, slopes, out, log_sums = kept

    def step(source: jax.Array, block: Pair, d_query: jax.Array) -> tuple[jax.Array, Pair]:
        pairs = _Pairs(source < lax.axis_index(context.axis))
        keys, values = map(pairs.keys, block)
        whole = pairs.queries(out), pairs.log_sums(log_sums), pairs.queries(cotangent)
        mask, bias = context.mask(segments, pairs, source), context.bias(slopes, query, pairs, source)
        dq, dk, dv = backward(Block(False, implementation), pairs.queries(query), keys, values, *whole, mask, bias)
        return d_query + sum(pairs.to_queries(dq)), (pairs.to_keys(dk), pairs.to_keys(dv))

    mask, bias = context.mask(segments), context.bias(slopes, query)
    own = backward(Block(True, implementation), query, key, value, out, log_sums, cotangent, mask, bias)
    d_query, d_key, d_value = map(_wide, own)
    d_query, others = context.take_steps(step, (key, value), d_query)
    d_key, d_value = jax.tree.map(jnp.add, (d_key, d_value), others)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), None, None


_attention.defvjp(_forward, _backward)
