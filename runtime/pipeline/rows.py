"""Reads from the tables what one stage does in one tick. Tick and stage are known only at run time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dhelix.runtime.pipeline.tables import Direction


class Row:
    """The table entries of one direction for one tick and one stage. `row.NAME` reads the table `Direction.NAME`."""

    def __init__(self, table: Direction, tick: jax.Array, stage: jax.Array):
        self.table, self.tick, self.stage = table, tick, stage

    def __getattr__(self, name: str) -> jax.Array:
        return jnp.asarray(getattr(self.table, name))[self.tick, self.stage]

    def of_any_stage(self, name: str, condition: str) -> tuple[jax.Array, jax.Array]:
        """Entry `name` of the stage whose work has flag `condition` in this tick, and whether there is such a stage.

        At most one stage has such work.
        """
        chosen = getattr(self.table, condition) & self.table.on
        entry = np.where(chosen, getattr(self.table, name), 0).sum(axis=1)
        return jnp.asarray(entry.astype(np.int32))[self.tick], jnp.asarray(chosen.any(axis=1))[self.tick]
