"""Embedding and head of a pipeline, by all stages together or by the one that they belong to.

Shared: all stages compute an end for the same micro-batch, each its share of it, which the model's own collectives
over the pipeline axis put together. The head's input is zero but on the stage that made it, and the model sums it or
scatters the sum; its cotangent counts on that stage alone. Likewise the embedding's result serves the stage of the
first chunk, and its cotangent is zero on the others.

Not shared: one stage computes, in a loop of one round where the others' have none; the next message makes them wait.
Or all compute, `along`, and all but one drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dhelix.runtime.pipeline.derivatives import Derivatives
from dhelix.runtime.pipeline.rows import Row
from dhelix.runtime.pipeline.slices import at, choose, where, zeros

Values = list[Any]


@dataclass(frozen=True)
class Ends:
    """
    Attributes:
      of: embedding and head, forward and backward.
      params: their parameters.
      batches: of all micro-batches, [M, ...] each.
      shared: see above.
      lockstep: whether a tick that holds an end always needs it.
      along: whether stages that do not need an end compute it, too.
    """

    of: Derivatives
    params: Values
    batches: Sequence[Any]
    shared: bool
    lockstep: bool
    along: bool = False

    def batch(self, microbatch: Any) -> Values:
        return [at(array, microbatch) for array in self.batches]

    def embed(self, forward: Row) -> Values:
        """What the first chunk reads, on its stage."""
        microbatch, wanted = self._of(forward, "opens")
        start = [zeros(x) for x in self.of.state]
        return self._if(wanted, lambda _: self.of.embed(self.params, self.batch(microbatch)), start)

    def head(self, backward: Row, last: Values, sums: Values, outputs: Values) -> tuple[Values, Values, Values]:
        """The cotangents of `last`, what the last chunk made, on its stage; gradients and outputs are added."""
        microbatch, wanted = self._of(backward, "opens")
        mine = backward.on & backward.opens

        def run(carry: Any) -> Any:
            _, sums, outputs = carry
            x = [jnp.where(mine, value, 0) for value in last]
            cotangents, gradients, results = self.of.head(self.params, self.batch(microbatch), x)
            return cotangents, _add_all(sums, gradients, wanted), _add_all(outputs, results, wanted)

        start = [zeros(self.of.state[i]) for i in self.of.moving]
        return self._if(wanted, run, (start, sums, outputs))

    def embed_backward(self, backward: Row, counts: jax.Array, cotangents: Values, sums: Values) -> Values:
        """Gradients are added: those of what the first chunk read, whose cotangents its stage has.

        `counts`: whether this stage's micro-batch does; if not, its cotangents may be no numbers.
        """
        microbatch, wanted = self._of(backward, "closes")
        mine = backward.on & backward.closes & counts

        def run(sums: Values) -> Values:
            masked = [jnp.where(mine, value, 0) for value in cotangents]
            gradients = self.of.embed_backward(self.params, self.batch(microbatch), masked)
            return _add_all(sums, gradients, wanted)

        return self._if(wanted, run, sums)

    def _of(self, row: Row, condition: str) -> tuple[jax.Array, jax.Array]:
        """The micro-batch that this stage computes an end for in this tick, and whether it does."""
        if self.shared:
            return row.of_any_stage("microbatch", condition)
        return row.microbatch, row.on & getattr(row, condition)

    def _if(self, wanted: jax.Array, body: Callable[[Any], Any], carry: Any) -> Any:
        """`body(carry)` where it is wanted: a loop of no or one round, whose state XLA updates in place.

        In lockstep shared ends run in each tick that holds them, without a loop that hides them from the scheduler.
        """
        if self.shared and self.lockstep:
            return body(carry)
        if self.along:
            return where(wanted, body(carry), carry)
        return lax.fori_loop(0, wanted.astype(jnp.int32), lambda _, carry: body(carry), carry)


def _add_all(totals: Values, values: Values, counts: jax.Array) -> Values:
    sums = [total + value.astype(total.dtype) for total, value in zip(totals, values, strict=True)]
    return choose(counts, sums, totals)
