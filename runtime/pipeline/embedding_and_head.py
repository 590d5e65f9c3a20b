"""Computes the embedding and the head of a pipeline, on all stages together or on the stage that needs the result.

Embedding and head are the ends of the pipeline. There are two modes:

Shared: all stages compute an end for the same micro-batch. Each stage computes its share, and the model's own
collectives over the pipeline axis combine the shares. The head's input is zero except on the stage that made it. The
model sums this input over the stages, or scatters the sum. Only the stage that made the input uses the head's
cotangent. Likewise, only the stage of the first chunk uses the embedding's result, and the embedding's cotangent is
zero on all other stages.

Not shared: one stage computes the end, in a loop of one iteration. On the other stages this loop has no iterations, so
these stages go on to the next message and wait there. With `Ends.along`, all stages compute the end, and all but one
drop the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dhelix.passes.analysis.names import trips_name
from dhelix.runtime.pipeline.derivatives import Derivatives
from dhelix.runtime.pipeline.rows import Row
from dhelix.runtime.pipeline.slices import at, choose, where, zeros

Values = list[Any]


@dataclass(frozen=True)
class Ends:
    """Embedding and head of a step.

    Attributes:
      of: the pipeline's functions; the functions of embedding and head are used.
      params: the parameters of embedding and head.
      batches: inputs of all micro-batches; each array has the shape [M, ...].
      shared: whether all stages compute the ends together (see the module).
      lockstep: whether the schedule is lockstep (`Schedule.lockstep`). Then a tick's program contains an end only if
        some stage needs the end's result in this tick.
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

    def embed(self, forward: Row, trips: int) -> Values:
        """Returns the input of the first chunk. It is valid only on the stage of the first chunk.

        Args:
          trips: how often a stage of the critical path computes it in such a tick, for predictions.
        """
        microbatch, wanted = self._of(forward, "opens")
        start = [zeros(x) for x in self.of.state]
        return self._if(wanted, lambda _: self.of.embed(self.params, self.batch(microbatch)), start, trips)

    def head(
        self, backward: Row, last: Values, sums: Values, outputs: Values, trips: int
    ) -> tuple[Values, Values, Values]:
        """Runs the head forward and backward.

        Args:
          backward: this stage's row of the backward tables.
          last: the last chunk's result, valid on the stage of the last chunk.
          sums: sums of the gradients of the ends' parameters.
          outputs: sums of the loss function's outputs.
          trips: as in `embed`.

        Returns:
          The cotangents of `last`, valid on the stage of the last chunk; `sums` with the head's gradients added; and
          `outputs` with the head's outputs added.
        """
        microbatch, wanted = self._of(backward, "opens")
        mine = backward.on & backward.opens

        def run(carry: Any) -> Any:
            _, sums, outputs = carry
            x = [jnp.where(mine, value, 0) for value in last]
            cotangents, gradients, results = self.of.head(self.params, self.batch(microbatch), x)
            return cotangents, _add_all(sums, gradients, wanted), _add_all(outputs, results, wanted)

        start = [zeros(self.of.state[i]) for i in self.of.moving]
        return self._if(wanted, run, (start, sums, outputs), trips)

    def embed_backward(self, backward: Row, counts: jax.Array, cotangents: Values, sums: Values, trips: int) -> Values:
        """Returns `sums` with the embedding's gradients added.

        Args:
          backward: this stage's row of the backward tables.
          counts: whether the weight of this stage's micro-batch is not zero. If it is zero, cotangents may be NaN.
          cotangents: the cotangents of the first chunk's input.
          sums: sums of the gradients of the ends' parameters.
          trips: as in `embed`.
        """
        microbatch, wanted = self._of(backward, "closes")
        mine = backward.on & backward.closes & counts

        def run(sums: Values) -> Values:
            masked = [jnp.where(mine, value, 0) for value in cotangents]
            gradients = self.of.embed_backward(self.params, self.batch(microbatch), masked)
            return _add_all(sums, gradients, wanted)

        return self._if(wanted, run, sums, trips)

    def _of(self, row: Row, condition: str) -> tuple[jax.Array, jax.Array]:
        """The micro-batch for which this stage computes an end in this tick, and whether it computes the end at all."""
        if self.shared:
            return row.of_any_stage("microbatch", condition)
        return row.microbatch, row.on & getattr(row, condition)

    def _if(self, wanted: jax.Array, body: Callable[[Any], Any], carry: Any, trips: int) -> Any:
        """Returns `body(carry)` if wanted, else `carry`.

        The body runs in a loop of zero or one iteration, because XLA updates the state of a loop in place. Shared ends
        of a lockstep schedule run without this loop, because XLA's scheduler cannot move operations out of a loop.
        """
        if self.shared and self.lockstep:
            return body(carry)
        if self.along:
            return where(wanted, body(carry), carry)
        with jax.named_scope(trips_name(1 if self.shared else trips)):  # says to predictions whether it runs
            return lax.fori_loop(0, wanted.astype(jnp.int32), lambda _, carry: body(carry), carry)


def _add_all(totals: Values, values: Values, counts: jax.Array) -> Values:
    sums = [total + value.astype(total.dtype) for total, value in zip(totals, values, strict=True)]
    return choose(counts, sums, totals)
