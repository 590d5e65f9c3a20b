"""A train step whose model states are sharded over data-parallel devices: `dhelix train --states zero1`."""

from __future__ import annotations

import dataclasses

import jax

from dhelix.errors import DhelixError
from dhelix.models.common.training import Training
from dhelix.runtime.sharding.placed_states import state_shardings


@dataclasses.dataclass(frozen=True)
class ShardedTraining(Training):
    """A `Training` whose `train_step` must run in `strand_interleave(sharding=states)`.

    Attributes:
      states: what `sharding_plan` takes.
    """

    states: str = "dp"


def with_states(training: Training, states: str) -> ShardedTraining:
    """`training` with its states placed under a plan.

    Args:
      states: a strategy, such as "zero1", or a plan's file.

    Raises:
      DhelixError: the plan does not fit the mesh, or a pipeline places its own states.
    """
    if type(training) is not Training:
        raise DhelixError("--states does not work with --pp, because a pipeline places its own states; leave it out")
    shardings = state_shardings(training.abstract_state(), states)
    init = jax.jit(training.init, out_shardings=shardings)
    fields = {field.name: getattr(training, field.name) for field in dataclasses.fields(Training)}
    return ShardedTraining(**fields | {"state_shardings": shardings, "init": init}, states=states)
