"""Executes a pipeline schedule in one SPMD program, which sums losses and gradients of all micro-batches.

The program runs under `shard_map`. The pipeline axis must be manual; other axes may be manual or automatic. Each stage
holds the layers of its own chunks. All stages run the same program. Tables (`tables.py`) say what each stage does in
each tick:

    x  = embed(micro-batch)      if the stage starts chunk 0                        else from the inbox
    dx = cotangent of the head   if it goes backward from the last chunk            else from the inbox
    for l in the layers of a chunk:                                        forward, backward, or both: an SI block
        residuals of layer n-1-l <- slot;  dx, dweights = backward(...);  gradients += dweights
        x, residuals = forward(x, weights of layer l);  slot <- residuals
    x, dx -> the stages that need them next (collective-permute), now or during the next tick (`phases.Messages`)

In an SI block, neither strand reads what the other strand computes. So this loop over layers has the same form as the
loop that the passes make of a step without a pipeline. The scheduling passes treat both loops alike. Messages are
sent after the loop and are exposed. With `sends_beside`, the last layers run after the loop, too, so that the
scheduling passes can overlap the messages with these layers.

The residual ring is an array of slots. A slot holds the residuals of one chunk for one micro-batch. The forward pass
may overwrite residuals that the backward pass reads in the same iteration. A barrier orders the read before the write;
without the barrier, XLA copies the whole ring.

Masking: in a lockstep schedule, a stage without work computes on arbitrary data, and the program drops the results.
Residuals go to a slot that nobody reads, and a `where` drops gradients (a product with 0 would keep NaNs). In other
schedules, a stage without work runs its layer loops zero times. On CPU devices, stages may rendezvous in each layer
(`gradients.py`). Then all stages run the loops, and a `where` drops the unwanted results. Masking costs one select per
gradient and tick, which XLA fuses into the addition.

Memory holds the residuals of `schedule.slots` chunks, one inbox per direction, and float32 gradients of the stage's
layers. The design is from DHelix section 4.1 (arXiv 2411.15871).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dhelix.passes.analysis.names import ALPHA, BETA, trips_name
from dhelix.passes.pipeline_fold import Pattern, Phase, Schedule, Trips, patterns, phases, trips_of
from dhelix.runtime.pipeline.derivatives import Derivatives
from dhelix.runtime.pipeline.embedding_and_head import Ends
from dhelix.runtime.pipeline.rows import Row
from dhelix.runtime.pipeline.slices import add, at, choose, fill, put, where, wide, zeros
from dhelix.runtime.pipeline.tables import directions

Values = list[Any]


@dataclass(frozen=True)
class Sums:
    """Sums over the micro-batches. Each stage holds the sums of its own work.

    Attributes:
      outputs: outputs of the loss function. They are zero on stages that did not compute the head.
      layers: gradients of the stage's stacked weights [chunks of the stage, padded, ...]; None for integers.
      ends: gradients of the parameters of embedding and head; None for integers. Sums of floats are at least float32.
    """

    outputs: Values
    layers: Values
    ends: Values


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a step.

    Attributes:
      of: the functions that compute the loss function's parts forward and backward.
      schedule: the schedule to execute.
      axis: the mesh axis of the stages.
      shared_ends: whether all stages compute embedding and head together (`embedding_and_head.py`).
      sends_beside: whether the last layers of an SI block follow its loop, so that messages can overlap with them.
      along: whether stages without work compute too and drop the results, under any schedule.
    """

    of: Derivatives
    schedule: Schedule
    axis: str
    shared_ends: bool
    sends_beside: bool
    along: bool = False

    def run(self, stage: jax.Array, stacks: Sequence[Any], ends: Sequence[Any], batches: Sequence[Any]) -> Sums:
        """Runs all ticks and returns the sums of this stage's work.

        Args:
          stage: the number of this stage, int32.
          stacks: the stage's weights; each array has the shape [chunks of the stage, padded, ...].
          ends: parameters of embedding and head.
          batches: inputs of all micro-batches; each array has the shape [M, ...].
        """
        return _Run(self, stage, stacks, ends, batches).all_phases()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """The state that each tick passes to the next. Inboxes are [places, ...], ring arrays are [slots, padded, ...]."""

    inbox: Values
    cotangents: Values
    late: Values  # results of the previous tick that are not sent yet (`phases.Messages`); empty if none is sent late
    late_cotangents: Values
    last: Values  # the last chunk's result, for the head
    ring: Values
    layers: Values
    ends: Values
    outputs: Values

    def but(self, **changes: Any) -> _State:
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Going:
    """The state that each layer passes to the next: x, cotangents, the residual ring and weight gradients."""

    x: Values
    cotangents: Values
    ring: Values
    layers: Values

    def but(self, **changes: Any) -> _Going:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class _Tick:
    """One tick of this stage.

    Attributes:
      pattern: what any stage may do in the tick.
      forward, backward: this stage's row in the table of each direction.
      ahead, behind: the context that layers read (`Chain.context`), in the forward pass and in the backward pass.
      trips: how often loops are expected to run.
    """

    pattern: Pattern
    forward: Row
    backward: Row
    ahead: Values
    behind: Values
    trips: Trips


class _Run:
    def __init__(
        self, pipeline: Pipeline, stage: jax.Array, stacks: Sequence[Any], ends: Sequence[Any], batches: Sequence[Any]
    ):
        self.axis, self.of, self.schedule = pipeline.axis, pipeline.of, pipeline.schedule
        self.stage, self.stacks = stage, list(stacks)
        self.padded = self.schedule.layout.padded
        self.sends_beside = pipeline.sends_beside
        self.along = pipeline.along and not self.schedule.lockstep
        self.forward_table, self.backward_table = directions(self.schedule)
        self.ends = Ends(self.of, list(ends), batches, pipeline.shared_ends, self.schedule.lockstep, pipeline.along)
        self.context = self.of.context(self.ends.batch(0))
        self.counts = lax.map(self.of.weight, list(batches)) != 0  # a micro-batch without tokens may yield NaN

    def all_phases(self) -> Sums:
        state = self._start()
        for phase, trips in zip(phases(self.schedule), trips_of(self.schedule), strict=True):
            state = self._phase(phase, trips, state)
        layers = fill(self.stacks, self.of.trained, state.layers)
        return Sums(state.outputs, layers, fill(self.ends.params, self.of.trained_ends, state.ends))

    def _start(self) -> _State:
        of, params, held = self.of, self.ends.params, patterns(self.schedule)
        return _State(
            inbox=[zeros(x, self.forward_table.inbox) for x in of.state],
            cotangents=[zeros(of.state[i], self.backward_table.inbox) for i in of.moving],
            late=[zeros(x) for x in of.state] if any(p.activations.before for p in held) else [],
            late_cotangents=[zeros(of.state[i]) for i in of.moving] if any(p.cotangents.before for p in held) else [],
            last=[zeros(x) for x in of.state],
            ring=[zeros(residual, self.schedule.slots, self.padded) for residual in of.residuals],
            layers=[zeros(self.stacks[i], dtype=wide(self.stacks[i])) for i in of.trained],
            ends=[zeros(params[i], dtype=wide(params[i])) for i in of.trained_ends],
            outputs=[zeros(output, dtype=wide(output)) for output in of.outputs],
        )

    def _phase(self, phase: Phase, trips: Sequence[Trips], state: _State) -> _State:
        def one_round(number: jax.Array, state: _State) -> _State:
            tick = phase.first + number * len(phase.patterns)
            for (pattern, ticks), expected in zip(phase.runs, trips, strict=True):
                state = self._run(pattern, tick, ticks, expected, state)
                tick += ticks
            return state

        return lax.fori_loop(0, phase.rounds, one_round, state)

    def _run(self, pattern: Pattern, first: jax.Array, ticks: int, trips: Trips, state: _State) -> _State:
        """Runs `ticks` ticks, starting with tick `first`."""

        def one_tick(number: jax.Array | int, state: _State) -> _State:
            tick = self._tick(pattern, first + number, trips)
            arrived = self._exchange_late(tick, state)
            state, going = self._begin(tick, state)
            going = self._chunk(tick, going)
            if pattern.activations.before or pattern.cotangents.before:
                arrived, going = self._arrived(arrived, going)
            return self._end(tick, self._receive_late(tick, state, *arrived), going)

        return one_tick(0, state) if ticks == 1 else lax.fori_loop(0, ticks, one_tick, state)

    def _chunk(self, tick: _Tick, going: _Going) -> _Going:
        """Runs all layers of a chunk in the forward pass, in the backward pass, or in both at once."""
        n, pattern, forward, backward = self.padded, tick.pattern, tick.forward.on, tick.backward.on

        def ahead(layer: jax.Array, going: _Going) -> _Going:
            return self._layer_forward(tick, layer, going)

        def behind(layer: jax.Array, going: _Going) -> _Going:
            return self._layer_backward(tick, n - 1 - layer, going, written=False)

        def both(layer: jax.Array, going: _Going) -> _Going:
            return self._layer_forward(tick, layer, self._layer_backward(tick, n - 1 - layer, going, written=True))

        kinds = [
            (pattern.forward, ahead, forward & ~backward, tick.trips.forward),
            (pattern.backward, behind, backward & ~forward, tick.trips.backward),
            (pattern.both, both, forward & backward, tick.trips.both),
        ]
        for wanted, body, on, trips in kinds:
            if wanted and self.schedule.lockstep:
                going = lax.fori_loop(0, n - (self.sends_beside and body is both), body, going)
            elif wanted and self.along:
                going = lax.fori_loop(
                    0, n, lambda layer, going, body=body, on=on: where(on, body(layer, going), going), going
                )
            elif wanted:
                with jax.named_scope(trips_name(trips)):  # says to predictions how long the loop is
                    going = lax.fori_loop(0, jnp.where(on, n, 0), body, going)
            if wanted and body is behind:  # a later loop writes the ring; it must wait until this loop has read it
                ring, cotangents = lax.optimization_barrier((going.ring, going.cotangents))
                going = going.but(ring=ring, cotangents=cotangents)
        if pattern.both and self.sends_beside:
            going = self._last_pair(tick, going)
        if pattern.forward and pattern.backward:  # a send must not wait for its receiver while a loop still runs
            x, cotangents = lax.optimization_barrier((going.x, going.cotangents))
            going = going.but(x=x, cotangents=cotangents)
        return going

    def _last_pair(self, tick: _Tick, going: _Going) -> _Going:
        """Runs the last layer of both strands. Neither strand waits for the other.

        The index of each layer is made to depend on the values that the loop computed. Otherwise XLA would fetch the
        layer's operands before the loop, and they would take memory during the loop.
        """
        behind = _after([*going.cotangents, *going.layers], 0)
        ahead = _after(going.x, self.padded - 1)
        return self._layer_forward(tick, ahead, self._layer_backward(tick, behind, going, written=True))

    def _begin(self, tick: _Tick, state: _State) -> tuple[_State, _Going]:
        x = self._begin_forward(tick, state)
        state, cotangents = self._begin_backward(tick, state)
        if tick.pattern.forward and tick.pattern.head:  # all stages meet in a shared head; no layer may start before it
            x, cotangents = lax.optimization_barrier((x, cotangents))
        return state, _Going(x, cotangents, state.ring, state.layers)

    def _end(self, tick: _Tick, state: _State, going: _Going) -> _State:
        state = state.but(ring=going.ring, layers=going.layers)
        if tick.pattern.forward or tick.pattern.both:
            state = self._end_forward(tick, state, going.x)
        if tick.pattern.backward or tick.pattern.both:
            state = self._end_backward(tick, state, going.cotangents)
        return state

    # One layer.

    def _layer_forward(self, tick: _Tick, layer: jax.Array, going: _Going) -> _Going:
        row = tick.forward
        weights = [at(stack, row.place, layer) for stack in self.stacks]
        with jax.named_scope(BETA):
            x, residuals = self.of.layer_forward(tick.ahead, going.x, weights)
        place = row.slot, self._place(row, layer)
        ring = [put(slots, value, *place) for slots, value in zip(going.ring, residuals, strict=True)]
        return going.but(x=self._unless_padding(layer < row.layers, x, going.x), ring=ring)

    def _layer_backward(self, tick: _Tick, layer: jax.Array, going: _Going, written: bool) -> _Going:
        """Runs one layer backward. If `written`, a forward layer of this iteration may overwrite the residuals."""
        row, ring = tick.backward, going.ring
        saved = [at(slots, row.slot, self._place(row, layer)) for slots in ring]
        if written:
            saved, ring = lax.optimization_barrier((saved, ring))
        weights = [at(stack, row.place, layer) for stack in self.stacks]
        with jax.named_scope(ALPHA):
            result, gradients = self.of.layer_backward(tick.behind, weights, saved, going.cotangents)
        real = layer < row.layers
        counts = row.on & real & self.counts[row.microbatch]
        layers = [
            add(total, gradient, counts, row.place, layer)
            for total, gradient in zip(going.layers, gradients, strict=True)
        ]
        return going.but(cotangents=self._unless_padding(real, result, going.cotangents), ring=ring, layers=layers)

    def _place(self, row: Row, layer: jax.Array) -> jax.Array:
        return jnp.where(row.reversed, self.padded - 1 - layer, layer)

    def _unless_padding(self, real: jax.Array, result: Values, given: Values) -> Values:
        """Returns `result` for a real layer, and the layer's input `given` for a padding layer."""
        padding = len(set(self.schedule.layout.chunk_layers)) > 1
        return choose(real, result, given) if padding else result

    # Begin and end of a chunk.

    def _begin_forward(self, tick: _Tick, state: _State) -> Values:
        x = [at(inbox, tick.forward.takes) for inbox in state.inbox]
        if not tick.pattern.embed:
            return x
        return choose(tick.forward.opens, self.ends.embed(tick.forward, tick.trips.embed), x)

    def _end_forward(self, tick: _Tick, state: _State, x: Values) -> _State:
        if tick.pattern.activations.late:
            state = state.but(late=x)
        else:
            arrived = self._exchange(x, tick.pattern.activations.now)
            state = state.but(inbox=_put_message(tick.forward, "puts", "stays", state.inbox, x, arrived))
        return state.but(last=choose(tick.forward.closes, x, state.last))

    def _begin_backward(self, tick: _Tick, state: _State) -> tuple[_State, Values]:
        cotangents = [at(inbox, tick.backward.takes) for inbox in state.cotangents]
        if not tick.pattern.head:
            return state, cotangents
        from_head, ends, outputs = self.ends.head(tick.backward, state.last, state.ends, state.outputs, tick.trips.head)
        return state.but(ends=ends, outputs=outputs), choose(tick.backward.opens, from_head, cotangents)

    def _end_backward(self, tick: _Tick, state: _State, cotangents: Values) -> _State:
        if tick.pattern.embed_backward:
            counts = self.counts[tick.backward.microbatch]
            trips = tick.trips.embed_backward
            state = state.but(ends=self.ends.embed_backward(tick.backward, counts, cotangents, state.ends, trips))
        if tick.pattern.cotangents.late:
            return state.but(late_cotangents=cotangents)
        arrived = self._exchange(cotangents, tick.pattern.cotangents.now)
        return state.but(cotangents=_put_message(tick.backward, "puts", "stays", state.cotangents, cotangents, arrived))

    # Messages.

    def _exchange_late(self, tick: _Tick, state: _State) -> tuple[Values, Values]:
        """Sends the previous tick's results to the stages that need them, while this tick computes."""
        activations = self._exchange(state.late, tick.pattern.activations.before)
        return activations, self._exchange(state.late_cotangents, tick.pattern.cotangents.before)

    def _arrived(self, messages: tuple[Values, Values], going: _Going) -> tuple[tuple[Values, Values], _Going]:
        """Waits for late messages after the layers, and before the ends (embedding or head) that follow the layers.

        An end may contain collectives. If it ran before the wait, XLA could hide the message neither behind the end nor
        behind the layers.
        """
        messages, x, cotangents = lax.optimization_barrier((messages, going.x, going.cotangents))
        return messages, going.but(x=x, cotangents=cotangents)

    def _receive_late(self, tick: _Tick, state: _State, activations: Values, cotangents: Values) -> _State:
        if tick.pattern.activations.before:
            put = _put_message(tick.forward, "late_puts", "late_stays", state.inbox, state.late, activations)
            state = state.but(inbox=put)
        if tick.pattern.cotangents.before:
            late = state.late_cotangents
            put = _put_message(tick.backward, "late_puts", "late_stays", state.cotangents, late, cotangents)
            state = state.but(cotangents=put)
        return state

    def _exchange(self, made: Values, ways: Sequence[tuple[int, int]]) -> Values:
        return [lax.ppermute(value, self.axis, ways) for value in made] if ways else made

    def _tick(self, pattern: Pattern, number: Any, trips: Trips) -> _Tick:
        forward, backward = (Row(table, number, self.stage) for table in (self.forward_table, self.backward_table))
        return _Tick(pattern, forward, backward, self._context(forward), self._context(backward), trips)

    def _context(self, row: Row) -> Values:
        return self.of.context(self.ends.batch(row.microbatch)) if self.of.context_of_batch else self.context


def _after(values: Values, layer: int) -> jax.Array:
    return lax.optimization_barrier((values, jnp.int32(layer)))[1]


def _put_message(row: Row, place: str, stays: str, inbox: Values, made: Values, arrived: Values) -> Values:
    """Returns `inbox` with the message `arrived` stored, or with `made` if this stage reads its own result next.

    `place` and `stays` name entries of the row. If no stage sent a message, `arrived` is `made`.
    """
    some_stay = arrived is not made and getattr(row.table, stays).any()
    brought = choose(getattr(row, stays), made, arrived) if some_stay else arrived
    return [put(places, value, getattr(row, place)) for places, value in zip(inbox, brought, strict=True)]
