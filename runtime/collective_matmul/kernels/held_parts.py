"""Stores a warpgroup's part of a tile, or adds other devices' parts to it, while the next tile is multiplied.

Pieces of the part are processed one after the other, in turns. `staged` is the memory for parts that other devices have
sent:

    turn          Storing                            Adding (others' parts of the same tile, from `staged`)
      0           piece 0 -> slot 0 -> its place     pieces 0 of all sources -> slots                 (TMA)
      1           piece 1 -> slot 1 -> its place     piece 0 + slots, in float32 -> last slot -> its place;
                                                     pieces 1 of all sources -> slots
      ...         ...                                ...

Until all turns are over, the part stays in registers, rounded (`Held`). If the next tile has enough steps, several
steps lie between two turns (`Gemm.turn_steps`). So a load that one turn starts has completed at the next turn. Loading
each piece only when it is needed was much slower (docs/research_log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from dhelix.runtime.collective_matmul.kernels import opaque
from dhelix.runtime.collective_matmul.kernels.gemm_tiles import PIECE_ROWS, Gemm, Place, Store

_AHEAD_COLUMNS = 192  # columns of all pieces that `Adding.finish` has in flight; they take 48 registers


class Held(NamedTuple):
    """A warpgroup's part of a tile, rounded to the result's type, and its place in the result."""

    part: jax.Array
    place: Place


@dataclass(frozen=True)
class Storing:
    """Stores parts. Each compute warpgroup has its own instance.

    Attributes:
      gemm: the GEMM.
      slots: this warpgroup's slots in shared memory, [store_slots, 64, store_columns].
      store: a function (place, slot, number) that copies the number-th piece of a part from its slot to its place, with
        `plgpu.copy_smem_to_gmem` as one group.
    """

    gemm: Gemm
    slots: Any
    store: Store

    def behind(self, held: Held, turn: int) -> None:
        """Stores piece number `turn`, after the previous piece in its slot has been read."""
        gemm = self.gemm
        pieces = gemm.pieces(held.part.shape)
        if turn >= len(pieces):
            return
        if turn == 0 and len(pieces) % gemm.store_slots:  # the previous part did not end with the last slot
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.wait_smem_to_gmem(gemm.store_slots - 1, wait_read_only=True)
        slot = self.slots.at[turn % gemm.store_slots]
        slot[...] = piece_of(gemm, held.part, turn)
        plgpu.commit_smem()
        self.store(place_of(gemm, held, turn), slot, turn)

    def finish(self, held: Held) -> None:
        """Stores all pieces."""
        for number, _ in enumerate(self.gemm.pieces(held.part.shape)):
            self.behind(held, number)


@dataclass(frozen=True)
class Adding:
    """Adds the parts of several sources to a held part in float32, and stores the rounded sum.

    Each compute warpgroup has its own instance. A source is a device whose part of the same tile is in staging memory.

    Attributes:
      gemm: the GEMM. `behind` needs more slots than there are sources.
      slots, store: see `Storing`. Before turn 0, the pieces that `Storing` put into the slots must have been read.
      loaded: barrier of this warpgroup, with as many arrivals as there are sources.
      staged: a function (source, number) that returns a reference to the source's number-th piece.
      sources: number of sources. Their parts are added in the order of their numbers.
    """

    gemm: Gemm
    slots: Any
    store: Store
    loaded: Any
    staged: Callable[[int, int], Any]
    sources: int

    def behind(self, held: Held, turn: int) -> None:
        """Adds the piece that the previous turn loaded, and loads the next piece."""
        pieces = len(self.gemm.pieces(held.part.shape))
        if 0 < turn <= pieces:
            self._add(held, turn - 1)
        if turn < pieces:
            for source in range(self.sources):
                plgpu.copy_gmem_to_smem(self.staged(source, turn), self.slots.at[source], self.loaded)

    def finish(self, held: Held) -> None:
        """Adds and stores all pieces. Loads go directly into registers, and start several pieces ahead."""
        gemm, pieces = self.gemm, len(self.gemm.pieces(held.part.shape))
        places = [(source, number) for number in range(pieces) for source in range(self.sources)]
        ahead = max(1, _AHEAD_COLUMNS // gemm.store_columns)

        def load(source: int, number: int) -> jax.Array:
            return plgpu.load(self.staged(source, number), layout=plgpu.Layout.WGMMA, optimized=False)

        loaded = [load(*place) for place in places[:ahead]]
        for number in range(pieces):
            total = piece_of(gemm, held.part, number).astype(jnp.float32)
            for _ in range(self.sources):
                total += loaded.pop(0).astype(jnp.float32)
                if places[ahead:]:
                    loaded.append(load(*places.pop(ahead)))
            self._store(held, total, number)

    def _add(self, held: Held, number: int) -> None:
        plgpu.barrier_wait(self.loaded)
        total = opaque.part(piece_of(self.gemm, held.part, number)).astype(jnp.float32)
        for source in range(self.sources):
            total += plgpu.load(self.slots.at[source], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        self._store(held, total, number)

    def _store(self, held: Held, total: jax.Array, number: int) -> None:
        slot = self.slots.at[self.gemm.store_slots - 1]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slot[...] = total.astype(self.gemm.dtype)
        plgpu.commit_smem()  # after this, the whole warpgroup has also read the other slots
        self.store(place_of(self.gemm, held, number), slot, number)


def piece_of(gemm: Gemm, part: jax.Array, number: int) -> jax.Array:
    """The number-th piece of a warpgroup's part of a tile."""
    row, column = gemm.pieces(part.shape)[number]
    return part[row : row + PIECE_ROWS, column : column + gemm.store_columns]


def place_of(gemm: Gemm, held: Held, number: int) -> Place:
    """The place of the number-th piece of a part."""
    row, column = gemm.pieces(held.part.shape)[number]
    # The compiler does not know that these loop-carried values are multiples of the sizes of a piece.
    first = (
        pl.multiple_of(held.place.row + row, PIECE_ROWS),
        pl.multiple_of(held.place.column + column, gemm.store_columns),
    )
    return Place(held.place.number, *first)
