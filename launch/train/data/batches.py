"""Batches of rows, shuffled anew in each epoch, read ahead by Grain while a step runs.

    batches = Batches(Rows(...), batch=16, sharding=training.batch_sharding, seed=0)
    for arrays in batches.after(row): ...        {"tokens": [16, seq + 1], "segments": ...}, from this row on

Row n of a run is a function of `n` and the seed alone: Grain's shuffle is a permutation that is computed, not stored.
So a run that resumes continues with the row after the last one, on any number of hosts and with any batch size. In an
epoch each row comes once. A host reads only the rows that its own devices hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dhelix.launch.train.data.rows import Rows

_AHEAD = 4  # batches that are read before they are needed
_FAR = 2**40  # more batches than any run has


class Batches:
    """The batches of a run.

    Args:
      rows: the rows of an epoch.
      batch: number of rows of a batch.
      sharding: how a batch is split over devices.
      seed: seed of the order; None: the order of the documents.
    """

    def __init__(self, rows: Rows, batch: int, sharding: NamedSharding, seed: int | None) -> None:
        import grain  # takes a second, which commands without batches need not wait for

        self.rows, self.batch, self.sharding = rows, batch, sharding
        source = grain.MapDataset.source(rows)
        self._endless = (source if seed is None else source.seed(seed).shuffle()).repeat()

    @property
    def per_epoch(self) -> float:
        """Number of batches of an epoch."""
        return len(self.rows) / self.batch

    @property
    def _shape(self) -> tuple[int, int]:
        return self.batch, self.rows.seq + 1

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The rows of a batch that devices of this host hold, in order."""
        indices = self.sharding.addressable_devices_indices_map(self._shape).values()
        return tuple(sorted({row for index in indices for row in range(*index[0].indices(self.batch))}))  # type: ignore

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Row `number` of the run, counted over all epochs."""
        found: Any = self._endless[number]  # only a filter could make it None
        return found

    def after(self, row: int) -> Iterator[dict[str, jax.Array]]:
        """The batches of the rows from `row` on, without end."""
        import grain

        ahead = grain.ReadOptions(num_threads=_AHEAD, prefetch_buffer_size=_AHEAD)
        own = grain.MapDataset.range(_FAR).map(lambda n: self._own(row + int(n) * self.batch))
        for arrays in own.to_iter_dataset(ahead):
            yield self._placed(arrays)

    def _own(self, first: int) -> dict[str, np.ndarray]:
        """This host's rows of the batch that starts with row `first`, `[own rows, seq + 1]` each."""
        rows = [self.row(first + n) for n in self.own]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _placed(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        place = {row: n for n, row in enumerate(self.own)}

        def array(own: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                return own[[place[row] for row in range(*index[0].indices(self.batch))]][:, index[1]]

            return jax.make_array_from_callback(self._shape, self.sharding, part)

        return {name: array(own) for name, own in arrays.items()}
