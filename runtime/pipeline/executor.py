"""Executes a pipeline schedule in one SPMD program: losses and gradients of all micro-batches.

Runs under `shard_map` with the pipeline axis manual; other axes may be manual too, or automatic. Each stage holds its
own chunks' layers; all run the same program, and tables (`phases.py`) say what a stage does in a tick:

    for phase: for round: for each tick of the pattern:
      x  = embed(micro-batch)      where the stage starts chunk 0            else from the inbox
      dx = cotangent of the head   where the stage goes backward from the last chunk, else from the inbox
      for l in layers of a chunk:                                            forward, backward, or both: an SI block
          residuals of layer n-1-l  <- slot;  dx, dweights = backward(...);  gradients[layer n-1-l] += dweights
          x, residuals = forward(x, weights[layer l]);                       slot <- residuals
      x, dx -> the stages that need them next (collective-permute)

In an SI block neither strand reads what the other one makes, so the loop over layers is what the passes make of a step
without a pipeline, and the same scheduling applies. A forward may write its residuals over those that the backward has
read in the same iteration; a barrier keeps the read before the write, else XLA copies the whole ring.

Masking. In a lockstep schedule a stage without work computes along, on whatever lies there, and what it makes is
dropped: residuals go to a dead slot, gradients pass a `where` (never a product: 0 * NaN). In other schedules the loops
over layers run zero times where a stage has nothing to do, so each runs its own work only.

The ends, embedding and head. If their code communicates over the pipeline axis, they are *shared*: all stages compute
them for the same micro-batch, each its share (of the vocabulary, say), the head's input is broadcast and its cotangent
summed. Otherwise the stage of the first or of the last chunk computes them alone, and the others wait.

Memory: `schedule.slots` times the residuals of one chunk, one inbox each way, float32 gradients of the stage's layers.
Cost of masking: a select per gradient and tick, fused into the addition. DHelix paper, 4.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dhelix.passes.pipeline_fold import Schedule
from dhelix.passes.strand_duplication import ALPHA, BETA
from dhelix.runtime.pipeline.derivatives import Derivatives
from dhelix.runtime.pipeline.phases import Direction, Pattern, directions, phases
from dhelix.runtime.pipeline.slices import add, at, put

Values = list[Any]


@dataclass(frozen=True)
class Sums:
    """Sums over the micro-batches, on each stage: of the work that it did itself.

    Attributes:
      outputs: of the loss function; zero on stages that did not compute the head.
      layers: float32 gradients of the stage's stacked weights [chunks of the stage, padded, ...]; None for integers.
      ends: float32 gradients of the ends' parameters; None for integers.
    """

    outputs: Values
    layers: Values
    ends: Values


@dataclass(frozen=True)
class Pipeline:
    """What a step's pipeline is made of.

    Attributes:
      of: the loss function's parts, forward and backward.
      axis: the mesh axis of the stages.
      shared_ends: whether all stages compute embedding and head together.
    """

    of: Derivatives
    schedule: Schedule
    axis: str
    shared_ends: bool

    def run(self, stage: jax.Array, stacks: Sequence[Any], ends: Sequence[Any], batches: Sequence[Any]) -> Sums:
        """
        Args:
          stage: the number of this stage, int32.
          stacks: the stage's weights, [chunks of the stage, padded, ...] each.
          ends: parameters of embedding and head.
          batches: of all micro-batches, [M, ...] each.
        """
        return _Run(self, stage, stacks, ends, batches).all_phases()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """What goes from tick to tick. Inboxes are [places, ...], the ring [slots, padded, ...], per array."""

    inbox: Values
    cotangents: Values
    last: Values  # the last chunk's result, for the head
    ring: Values
    layers: Values
    ends: Values
    outputs: Values


class _Row:
    """One tick's entries of a direction's tables for this stage."""

    def __init__(self, table: Direction, tick: jax.Array, stage: jax.Array):
        self.table, self.tick, self.stage = table, tick, stage

    def __getattr__(self, name: str) -> jax.Array:
        return jnp.asarray(getattr(self.table, name))[self.tick, self.stage]

    def of_any_stage(self, name: str, condition: str) -> tuple[jax.Array, jax.Array]:
        """Entry `name` of the one stage for which `condition` holds in this tick, and whether there is one."""
        chosen = getattr(self.table, condition) & self.table.on
        entry = np.where(chosen, getattr(self.table, name), 0).sum(axis=1)
        return jnp.asarray(entry.astype(np.int32))[self.tick], jnp.asarray(chosen.any(axis=1))[self.tick]


class _Run:
    def __init__(
        self, pipeline: Pipeline, stage: jax.Array, stacks: Sequence[Any], ends: Sequence[Any], batches: Sequence[Any]
    ):
        self.pipeline, self.of, self.schedule = pipeline, pipeline.of, pipeline.schedule
        self.stage, self.stacks, self.ends, self.batches = stage, list(stacks), list(ends), list(batches)
        self.padded = self.schedule.layout.padded
        self.forward_table, self.backward_table = directions(self.schedule)
        self.context = self.of.context(self._batch(0))

    def all_phases(self) -> Sums:
        state = self._start()
        for phase in phases(self.schedule):

            def one_round(number: jax.Array, state: _State, phase: Any = phase) -> _State:
                for place, pattern in enumerate(phase.patterns):
                    tick = phase.first + number * len(phase.patterns) + place
                    state = self._tick(pattern, tick, state)
                return state

            state = lax.fori_loop(0, phase.rounds, one_round, state)
        return Sums(
            state.outputs,
            _fill(self.stacks, self.of.trained, state.layers),
            _fill(self.ends, self.of.trained_ends, state.ends),
        )

    def _start(self) -> _State:
        of, ring = self.of, (self.schedule.slots, self.padded)
        return _State(
            inbox=[_zeros(x, self.forward_table.inbox) for x in of.state],
            cotangents=[_zeros(of.state[i], self.backward_table.inbox) for i in of.moving],
            last=[_zeros(x) for x in of.state],
            ring=[_zeros(residual, *ring) for residual in of.residuals],
            layers=[_zeros(self.stacks[i], dtype=_wide(self.stacks[i])) for i in of.trained],
            ends=[_zeros(self.ends[i], dtype=_wide(self.ends[i])) for i in of.trained_ends],
            outputs=[_zeros(output, dtype=_wide(output)) for output in of.outputs],
        )

    def _tick(self, pattern: Pattern, tick: jax.Array, state: _State) -> _State:
        forward, backward = (_Row(table, tick, self.stage) for table in (self.forward_table, self.backward_table))
        x = [at(inbox, forward.takes) for inbox in state.inbox]
        cotangents = [at(inbox, backward.takes) for inbox in state.cotangents]
        ends, outputs, last = state.ends, state.outputs, state.last
        if pattern.embed:
            x = _choose(forward.opens, self._embed(forward), x)
        if pattern.head:
            from_head, ends, outputs = self._head(backward, last, ends, outputs)
            cotangents = _choose(backward.opens, from_head, cotangents)

        x, cotangents, ring, layers = self._layers(pattern, forward, backward, x, cotangents, state)

        inbox, waiting = state.inbox, state.cotangents
        if pattern.forward or pattern.both:
            last = _choose(forward.closes, x, last)
            inbox = self._deliver(forward, inbox, x, pattern.activations)
        if pattern.embed_backward:
            ends = self._embed_backward(backward, cotangents, ends)
        if pattern.backward or pattern.both:
            waiting = self._deliver(backward, waiting, cotangents, pattern.cotangents)
        return _State(inbox, waiting, last, ring, layers, ends, outputs)

    # The layers of a chunk.

    def _layers(
        self, pattern: Pattern, forward: _Row, backward: _Row, x: Values, cotangents: Values, state: _State
    ) -> tuple[Values, Values, Values, Values]:
        carry = x, cotangents, state.ring, state.layers
        kinds = [
            (True, False, pattern.forward, forward.on & ~backward.on),
            (False, True, pattern.backward, backward.on & ~forward.on),
            (True, True, pattern.both, forward.on & backward.on),
        ]
        contexts = [self._context(row) for row in (forward, backward)]
        for goes_forward, goes_backward, wanted, on in kinds:
            if wanted:
                rounds = self.padded if self.schedule.lockstep else jnp.where(on, self.padded, 0)
                rows = forward if goes_forward else None, backward if goes_backward else None
                carry = lax.fori_loop(0, rounds, functools.partial(self._layer, *rows, *contexts), carry)
        return carry

    def _layer(
        self, forward: _Row | None, backward: _Row | None, ahead: Values, behind: Values, number: jax.Array, carry: Any
    ) -> Any:
        """One layer of each direction."""
        x, cotangents, ring, layers = carry
        saved, mirrored = [], self.padded - 1 - number
        if backward is not None:
            place = jnp.where(backward.reversed, number, mirrored)
            saved = [at(slots, backward.slot, place) for slots in ring]
            if forward is not None:
                saved, ring = lax.optimization_barrier((saved, ring))
        if forward is not None:
            weights = [at(stack, forward.place, number) for stack in self.stacks]
            with jax.named_scope(BETA):
                result, residuals = self.of.layer_forward(ahead, x, weights)
            place = jnp.where(forward.reversed, mirrored, number)
            ring = [put(slots, value, forward.slot, place) for slots, value in zip(ring, residuals, strict=True)]
            x = self._unless_padding(number < forward.layers, result, x)
        if backward is not None:
            weights = [at(stack, backward.place, mirrored) for stack in self.stacks]
            with jax.named_scope(ALPHA):
                result, gradients = self.of.layer_backward(behind, weights, saved, cotangents)
            real = mirrored < backward.layers
            layers = [
                add(total, gradient, backward.on & real, backward.place, mirrored)
                for total, gradient in zip(layers, gradients, strict=True)
            ]
            cotangents = self._unless_padding(real, result, cotangents)
        return x, cotangents, ring, layers

    def _unless_padding(self, real: jax.Array, result: Values, given: Values) -> Values:
        """A padding layer is the identity."""
        padding = len(set(self.schedule.layout.chunk_layers)) > 1
        return _choose(real, result, given) if padding else result

    def _context(self, row: _Row) -> Values:
        return self.of.context(self._batch(row.microbatch)) if self.of.context_of_batch else self.context

    # Embedding and head.

    def _embed(self, row: _Row) -> Values:
        microbatch, wanted = self._end(row, "opens")
        start = [_zeros(x) for x in self.of.state]
        return self._if(wanted, lambda _: self.of.embed(self.ends, self._batch(microbatch)), start)

    def _head(self, row: _Row, last: Values, ends: Values, outputs: Values) -> tuple[Values, Values, Values]:
        """The cotangents of the last chunk's result, and the sums with those of one micro-batch added."""
        microbatch, wanted = self._end(row, "opens")
        mine = row.on & row.opens

        def run(carry: Any) -> Any:
            _, ends, outputs = carry
            x = self._sum([jnp.where(mine, value, 0) for value in last]) if self.pipeline.shared_ends else last
            cotangents, gradients, results = self.of.head(self.ends, self._batch(microbatch), x)
            if self.pipeline.shared_ends:
                cotangents = self._sum(cotangents)
            return cotangents, _add_all(ends, gradients, wanted), _add_all(outputs, results, wanted)

        start = [_zeros(self.of.state[i]) for i in self.of.moving]
        return self._if(wanted, run, (start, ends, outputs))

    def _embed_backward(self, row: _Row, cotangents: Values, ends: Values) -> Values:
        microbatch, wanted = self._end(row, "closes")
        mine = row.on & row.closes

        def run(ends: Values) -> Values:
            masked = [jnp.where(mine, value, 0) for value in cotangents]
            gradients = self.of.embed_backward(self.ends, self._batch(microbatch), masked)
            return _add_all(ends, gradients, wanted)

        return self._if(wanted, run, ends)

    def _end(self, row: _Row, condition: str) -> tuple[jax.Array, jax.Array]:
        """The micro-batch that this stage computes an end for in this tick, and whether it does."""
        if self.pipeline.shared_ends:
            return row.of_any_stage("microbatch", condition)
        return row.microbatch, row.on & getattr(row, condition)

    def _if(self, wanted: jax.Array, body: Callable[[Any], Any], carry: Any) -> Any:
        """`body(carry)` where it is wanted: a loop of no or one round, whose state XLA updates in place.

        In lockstep shared ends run in each tick that holds them, without a loop that hides them from the scheduler.
        """
        if self.pipeline.shared_ends and self.schedule.lockstep:
            return body(carry)
        return lax.fori_loop(0, wanted.astype(jnp.int32), lambda _, carry: body(carry), carry)

    def _sum(self, values: Values) -> Values:
        return [lax.psum(value, self.pipeline.axis) for value in values]

    # Messages and batches.

    def _deliver(self, row: _Row, inbox: Values, made: Values, sends: Sequence[tuple[int, int]]) -> Values:
        arrives = [lax.ppermute(value, self.pipeline.axis, sends) for value in made] if sends else made
        brought = _choose(row.stays, made, arrives) if sends else arrives
        return [put(places, value, row.puts) for places, value in zip(inbox, brought, strict=True)]

    def _batch(self, microbatch: Any) -> Values:
        return [at(array, microbatch) for array in self.batches]


def _add_all(totals: Values, values: Values, counts: jax.Array | None = None) -> Values:
    sums = [total + value.astype(total.dtype) for total, value in zip(totals, values, strict=True)]
    return sums if counts is None else _choose(counts, sums, totals)


def _choose(condition: jax.Array, yes: Values, no: Values) -> Values:
    return [jnp.where(condition, a, b) for a, b in zip(yes, no, strict=True)]


def _fill(like: Sequence[Any], places: Sequence[int], values: Values) -> Values:
    result: Values = [None] * len(like)
    for place, value in zip(places, values, strict=True):
        result[place] = value
    return result


def _wide(like: Any) -> Any:
    return jnp.promote_types(like.dtype, jnp.float32) if jnp.issubdtype(like.dtype, jnp.inexact) else like.dtype


def _zeros(like: Any, *leading: int, dtype: Any = None) -> jax.Array:
    return jnp.zeros((*leading, *like.shape), dtype or like.dtype)
