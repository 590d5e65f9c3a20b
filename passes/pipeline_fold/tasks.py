"""What the evaluator sees of a pipeline: tasks of each stage, in order, and how long they take.

Wider than `schedule.Schedule`: a backward may be split in two, the model may lie on the stages twice. Times are exact
fractions of the unit that the caller's costs are in, so that results can be compared for equality.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.slots import Item

Number = int | float | Fraction


@dataclass(frozen=True)
class PipelineCosts:
    """Times, all in one unit.

    Attributes:
      forward, backward: of one layer and one micro-batch on a stage.
      co_executed: of a layer forward beside another one backward (SI block); None: their sum.
      weight_gradient: the part of `backward` that makes gradients of weights; None: half. Zero-bubble V alone asks.
      embedding, head: of one micro-batch, forward and backward, if one stage does all of it.
      shared_ends: whether all stages do their share of embedding and head (sharded over the pipeline axis), and not the
        stages of the first and the last chunk all of it.
      send: of one message, from the end of the task to its arrival.
    """

    forward: Number
    backward: Number
    co_executed: Number | None = None
    weight_gradient: Number | None = None
    embedding: Number = 0
    head: Number = 0
    shared_ends: bool = True
    send: Number = 0

    def __post_init__(self) -> None:
        if self.forward <= 0 or self.backward <= 0 or (self.co_executed is not None and self.co_executed <= 0):
            raise DhelixError("pipeline costs: a layer takes time forward, backward, co-executed: above zero")
        if min(self.embedding, self.head, self.send, self.weight_gradient or 0) < 0:
            raise DhelixError("pipeline costs: a time is below zero; leave out what takes none")
        if self.weight_gradient is not None and self.weight_gradient > self.backward:
            raise DhelixError("pipeline costs: weight_gradient is a part of backward and cannot be more than it")

    def of_pair(self, forward_layers: int, backward_layers: int) -> Fraction:
        """Time of a cell that goes so many layers forward and so many backward, as many as possible side by side."""
        return _pair_time(self, forward_layers, backward_layers)

    def without_gain(self) -> PipelineCosts:
        """The same where co-execution gains nothing: these costs themselves, if it does not in them."""
        plain = replace(self, co_executed=None)
        return self if self.of_pair(1, 1) == plain.of_pair(1, 1) else plain

    def of_ends(self, microbatches: int) -> Fraction:
        """Time of embedding and head, all of it, for a step."""
        return microbatches * (Fraction(self.embedding) + Fraction(self.head))


@functools.cache
def _pair_time(costs: PipelineCosts, forward_layers: int, backward_layers: int) -> Fraction:
    forward, backward = Fraction(costs.forward), Fraction(costs.backward)
    pair = forward + backward if costs.co_executed is None else Fraction(costs.co_executed)
    pairs = min(forward_layers, backward_layers)
    return pairs * pair + (forward_layers - pairs) * forward + (backward_layers - pairs) * backward


# What tasks make and read: which kind of result, of which micro-batch, of which chunk.
Label = tuple[str, int, int]


@dataclass(frozen=True)
class Task:
    """What a stage does at one go.

    Attributes:
      reads, makes: results. Each is made by one task.
      takes: the chunk whose residuals it leaves, frees: the chunk whose residuals nobody needs afterwards.
      hands_over: whether it takes layer by layer the place that it frees, so that the two never lie side by side.
    """

    time: Fraction
    reads: tuple[Label, ...]
    makes: tuple[Label, ...]
    takes: int | None = None
    frees: int | None = None
    hands_over: bool = False

    @property
    def co_executed(self) -> bool:
        return self.takes is not None and self.frees is not None


@dataclass(frozen=True)
class StagePrograms:
    """A pipeline: what each stage does, in order.

    Attributes:
      chunk_layers: layers of each chunk.
      stage_layers: layers whose parameters each stage holds.
      orders: the tasks of each stage.
      shared: time of what all stages do together, beside their tasks.
    """

    name: str
    chunk_layers: tuple[int, ...]
    stage_layers: tuple[int, ...]
    orders: tuple[tuple[Task, ...], ...]
    shared: Fraction = Fraction(0)


def task(
    chunk_layers: Sequence[int], forward: Item | None, backward: Item | None, costs: PipelineCosts, hands_over: bool
) -> Task:
    """One chunk forward, or one backward, or both side by side: (micro-batch, chunk) each."""
    last = len(chunk_layers) - 1
    reads, makes = list[Label](), list[Label]()
    time = costs.of_pair(chunk_layers[forward[1]] if forward else 0, chunk_layers[backward[1]] if backward else 0)
    if forward is not None:
        microbatch, chunk = forward
        makes.append(("forward", microbatch, chunk))
        if chunk > 0:
            reads.append(("forward", microbatch, chunk - 1))
        elif not costs.shared_ends:
            time += Fraction(costs.embedding)
    if backward is not None:
        microbatch, chunk = backward
        makes.append(("backward", microbatch, chunk))
        reads.append(("backward", microbatch, chunk + 1) if chunk < last else ("forward", microbatch, chunk))
        if chunk == last and not costs.shared_ends:
            time += Fraction(costs.head)
    return Task(time, tuple(reads), tuple(makes), forward and forward[1], backward and backward[1], hands_over)
