"""A pipeline schedule as data: who computes what in which tick, and where residuals lie.

A model of L layers is cut into chunks of equal length; chunk c + 1 reads what chunk c makes. A stage is one place on
the mesh's pipeline axis; it holds one chunk or several. In a tick a stage computes at most one chunk of one micro-batch
forward and one backward. What a tick makes, the neighbour reads in the next one.

    tick            0     1     2     3     4     5    ...
    stage 0        F0.0              F1.0        B..        F1.0: micro-batch 1, chunk 0, forward
    stage 1              F0.1

Residuals, what the backward pass of a chunk needs of its forward pass, lie in the stage's ring of slots: from the tick
of the forward until the tick of the backward a slot belongs to one chunk of one micro-batch. In the same tick a forward
may take over the slot which the backward frees: layer by layer it writes where the backward has just read. The backward
walks the layers the other way round, so the new residuals lie in the slot in reverse order; `Work.reversed` says so.

A schedule is made by one of the functions beside this file, checked by `validation.validate`, timed by
`evaluation.evaluate` and executed by `dhelix.runtime.pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Which layers lie where.

    Attributes:
      stages: P, the size of the pipeline axis.
      chunk_layers: how many of the model's layers each chunk holds, in chunk order; they differ by one at most.
      stage_of: the stage of each chunk.
    """

    stages: int
    chunk_layers: tuple[int, ...]
    stage_of: tuple[int, ...]

    @property
    def chunks(self) -> int:
        return len(self.stage_of)

    @property
    def layers(self) -> int:
        """Layers of the model, without padding."""
        return sum(self.chunk_layers)

    @property
    def padded(self) -> int:
        """Layers that a chunk is stored and computed with: the longest chunk's. The others are padded with identity."""
        return max(self.chunk_layers)

    def layers_of(self, chunk: int) -> range:
        """The model's layers in `chunk`."""
        first = sum(self.chunk_layers[:chunk])
        return range(first, first + self.chunk_layers[chunk])

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks on `stage`, in chunk order: the order in which the stage stores them."""
        return tuple(chunk for chunk, place in enumerate(self.stage_of) if place == stage)

    def place_of(self, chunk: int) -> int:
        """Which of its stage's chunks `chunk` is, from 0."""
        return self.chunks_of(self.stage_of[chunk]).index(chunk)


@dataclass(frozen=True)
class Work:
    """One chunk of one micro-batch, forward or backward.

    Attributes:
      slot: of the stage's ring, where the forward leaves its residuals and the backward finds them.
      reversed: whether those of the chunk's layer l lie at place `padded - 1 - l` of the slot, and not at l.
    """

    microbatch: int
    chunk: int
    slot: int
    reversed: bool = False


@dataclass(frozen=True)
class Cell:
    """What one stage does in one tick. Both: an SI block, the two are co-executed."""

    forward: Work | None = None
    backward: Work | None = None


@dataclass(frozen=True)
class Schedule:
    """
    Attributes:
      name: of `catalogue.SCHEDULES`.
      ticks: the cells of each tick, stage by stage.
      slots: how many residual slots a stage's ring has; the same on every stage, since they run one program.
      lockstep: whether the program needs no branches: if any stage goes forward in a tick, all do, and the same for
        backward. A stage without such work computes along, and what it makes is masked; each tick costs what it does.
    """

    name: str
    layout: Layout
    microbatches: int
    ticks: tuple[tuple[Cell, ...], ...]
    slots: int
    lockstep: bool
