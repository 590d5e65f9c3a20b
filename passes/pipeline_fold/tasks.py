"""A pipeline as the evaluator sees it: the tasks of each stage in order, and their times.

This form is more general than `schedule.Schedule`: a backward may be split in two, and each layer may be on two stages.
Times are exact fractions in the unit of the caller's costs, so results can be compared for equality.
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
    """The times of a pipeline's parts, all in one unit.

    Attributes:
      forward, backward: times of the forward and the backward of one layer for one micro-batch.
      co_executed: time of one layer's forward and another layer's backward that overlap (SI block). None stands for
        `forward + backward`.
      weight_gradient: the part of `backward` for gradients of weights. None stands for half of `backward`. Only
        zero-bubble V uses this part.
      embedding, head: times of the whole embedding and the whole head for one micro-batch, forward and backward, on one
        stage.
      shared_ends: whether all stages share embedding and head equally (sharded over the pipeline axis). If not, the
        stages of the first and the last chunk compute them.
      send: time of one message, from the end of the task to the arrival of the message.
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
            raise DhelixError("pipeline costs: forward, backward and co_executed must be above zero")
        if min(self.embedding, self.head, self.send, self.weight_gradient or 0) < 0:
            raise DhelixError("pipeline costs: a time is below zero; leave out a part that takes no time")
        if self.weight_gradient is not None and self.weight_gradient > self.backward:
            raise DhelixError("pipeline costs: weight_gradient is a part of backward and cannot exceed it")

    def of_pair(self, forward_layers: int, backward_layers: int) -> Fraction:
        """Time of a cell with the given numbers of layers. As many layers as possible are co-executed."""
        return _pair_time(self, forward_layers, backward_layers)

    def without_gain(self) -> PipelineCosts:
        """The same costs without a gain from co-execution; `self` if these costs have no such gain."""
        plain = replace(self, co_executed=None)
        return self if self.of_pair(1, 1) == plain.of_pair(1, 1) else plain

    def of_ends(self, microbatches: int) -> Fraction:
        """Total time of embedding and head for a step."""
        return microbatches * (Fraction(self.embedding) + Fraction(self.head))


@functools.cache
def _pair_time(costs: PipelineCosts, forward_layers: int, backward_layers: int) -> Fraction:
    forward, backward = Fraction(costs.forward), Fraction(costs.backward)
    pair = forward + backward if costs.co_executed is None else Fraction(costs.co_executed)
    pairs = min(forward_layers, backward_layers)
    return pairs * pair + (forward_layers - pairs) * forward + (backward_layers - pairs) * backward


# A result of a task: (kind, micro-batch, chunk).
Label = tuple[str, int, int]


@dataclass(frozen=True)
class Task:
    """A piece of a stage's work that runs without interruption.

    Attributes:
      reads: results that the task needs.
      makes: results that the task makes. No other task makes them.
      takes: the chunk whose residuals the task stores; None if it stores none.
      frees: the chunk whose residuals the task frees; None if it frees none.
      hands_over: whether the task overwrites, layer by layer, the residuals that it frees. Then the old and the new
        residuals are never live in full at the same time.
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
    """A pipeline: the tasks of each stage in order.

    Attributes:
      chunk_layers: number of layers in each chunk.
      stage_layers: for each stage, the number of layers whose parameters it holds.
      orders: the tasks of each stage, in order.
      shared: time of the work that all stages do together, in addition to their tasks.
    """

    name: str
    chunk_layers: tuple[int, ...]
    stage_layers: tuple[int, ...]
    orders: tuple[tuple[Task, ...], ...]
    shared: Fraction = Fraction(0)


def task(
    chunk_layers: Sequence[int], forward: Item | None, backward: Item | None, costs: PipelineCosts, hands_over: bool
) -> Task:
    """A task of one forward, one backward, or both co-executed.

    Args:
      chunk_layers: number of layers in each chunk.
      forward, backward: the (micro-batch, chunk) of the forward and of the backward, or None.
      costs: times of layers, embedding and head.
      hands_over: as in `Task`.
    """
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
