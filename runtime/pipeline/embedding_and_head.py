"""Computes embedding and head of a pipeline, on all stages together or on the stage that needs them.

Shared: all stages compute an end for the same micro-batch. Each stage computes its share, and the model's own
collectives over the pipeline axis combine the shares. The head's input is zero except on the stage that made it; the
model sums it, or scatters the sum. The head's cotangent is used on that stage only. Likewise, only the stage of the
first chunk uses the embedding's result, and the embedding's cotangent is zero on all other stages.

Not shared: one stage computes the end, in a loop of one iteration. On the other stages that loop has no iterations, and
they wait at the next message. With `along`, all stages compute the end, and all but one drop the result.
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
    """Embedding and head of a step.

    Attributes:
      of: embedding and head, forward and backward.
      params: their parameters.
      batches: inputs of all micro-batches, [M, ...] each.
      shared: whether all stages compute the ends together (see the module).
      lockstep: whether every tick that contains an end needs it.
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
        """The input of the first chunk; valid on the stage of the first chunk."""
        microbatch, wanted = self._of(forward, "opens")
        start = [zeros(x) for x in self.of.state]
        return self._if(wanted, lambda _: self.of.embed(self.params, self.batch(microbatch)), start)

    def head(self, backward: Row, last: Values, sums: Values, outputs: Values) -> tuple[Values, Values, Values]:
        """Returns the cotangents of `last`, and `sums` and `outputs` with the head's gradients and outputs added.

        `last` is the last chunk's result. It and its cotangents are valid on the stage of the last chunk.
        """
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
        """Returns `sums` with the embedding's gradients added; `cotangents` belong to the first chunk's input.

        `counts`: whether this stage's micro-batch has weight. If not, its cotangents may be NaN.
        """
        microbatch, wanted = self._of(backward, "closes")
        mine = backward.on & backward.closes & counts

        def run(sums: Values) -> Values:
            masked = [jnp.where(mine, value, 0) for value in cotangents]
            gradients = self.of.embed_backward(self.params, self.batch(microbatch), masked)
            return _add_all(sums, gradients, wanted)

        return self._if(wanted, run, sums)

    def _of(self, row: Row, condition: str) -> tuple[jax.Array, jax.Array]:
        """The micro-batch whose end this stage computes in this tick, and whether it computes one."""
        if self.shared:
            return row.of_any_stage("microbatch", condition)
        return row.microbatch, row.on & getattr(row, condition)

    def _if(self, wanted: jax.Array, body: Callable[[Any], Any], carry: Any) -> Any:
        """`body(carry)` if wanted, else `carry`: a loop of zero or one iteration, whose state XLA updates in place.

        Shared ends of a lockstep schedule run without the loop, which would hide them from the scheduler.
        """
        if self.shared and self.lockstep:
            return body(carry)
        if self.along:
            return where(wanted, body(carry), carry)
        return lax.fori_loop(0, wanted.astype(jnp.int32), lambda _, carry: body(carry), carry)


def _add_all(totals: Values, values: Values, counts: jax.Array) -> Values:
    sums = [total + value.astype(total.dtype) for total, value in zip(totals, values, strict=True)]
    return choose(counts, sums, totals)
