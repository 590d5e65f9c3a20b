"""A pipeline schedule as data: which stage computes what in which tick, and where residuals are.

A model is cut into chunks of layers. The lengths of two chunks differ by at most one layer. Chunk c + 1 reads the
output of chunk c. A stage is one place on the mesh's pipeline axis and holds one or more chunks. In a tick, a stage
computes at most one forward and at most one backward, each of one chunk for one micro-batch. A neighbour can use the
results of a tick in the next tick.

    tick            0     1     2     3     4     5    ...
    stage 0        F0.0              F1.0        B..        F1.0: micro-batch 1, chunk 0, forward
    stage 1              F0.1

Residuals are the values that a chunk's backward needs from its forward. The stage stores them in an array of slots, the
residual ring. A slot holds the residuals of one chunk for one micro-batch, from the tick of the forward to the tick of
the backward. A forward may take over the slot that the backward of the same tick frees: layer by layer, the forward
writes where the backward has just read. The backward runs through the layers in reverse order. So the new residuals are
in the reverse order of the old residuals (`Work.reversed`).

The functions in `schedules/` make a schedule, `validation.validate` checks it, `evaluation.evaluate` times it, and
`dhelix.runtime.pipeline` executes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Which layers are on which stage.

    Attributes:
      stages: P, the size of the pipeline axis.
      chunk_layers: number of the model's layers in each chunk. Two of these numbers differ by at most one.
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
        """Number of layers of the model, without padding."""
        return sum(self.chunk_layers)

    @property
    def padded(self) -> int:
        """Number of layers that every chunk stores and computes: the length of the longest chunk.

        Shorter chunks get identity layers.
        """
        return max(self.chunk_layers)

    def layers_of(self, chunk: int) -> range:
        """The model's layers in `chunk`."""
        first = sum(self.chunk_layers[:chunk])
        return range(first, first + self.chunk_layers[chunk])

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The numbers of the chunks on `stage`, in increasing order. The stage stores its chunks in this order."""
        return tuple(chunk for chunk, place in enumerate(self.stage_of) if place == stage)

    def place_of(self, chunk: int) -> int:
        """Index of `chunk` among the chunks of its stage."""
        return self.chunks_of(self.stage_of[chunk]).index(chunk)


@dataclass(frozen=True)
class Work:
    """One chunk of one micro-batch, forward or backward.

    Attributes:
      slot: index of the residual slot. The forward writes its residuals to this slot, and the backward reads them.
      reversed: whether the residuals of the chunk's layer l are at index `padded - 1 - l` of the slot instead of index
        l.
    """

    microbatch: int
    chunk: int
    slot: int
    reversed: bool = False


@dataclass(frozen=True)
class Cell:
    """The work of one stage in one tick.

    A cell with a forward and a backward is an SI block: the stage co-executes both.
    """

    forward: Work | None = None
    backward: Work | None = None


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    Attributes:
      name: one of `catalogue.SCHEDULES`.
      ticks: the cells of each tick, by stage.
      slots: number of residual slots on each stage. It is the same on all stages, because they run one program.
      lockstep: whether the program needs no branches. In lockstep, all stages compute a forward in a tick if any stage
        has one. The same holds for backwards. The results of a stage without such work are masked.
    """

    name: str
    layout: Layout
    microbatches: int
    ticks: tuple[tuple[Cell, ...], ...]
    slots: int
    lockstep: bool
