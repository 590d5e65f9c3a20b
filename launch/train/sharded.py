"""A train step whose model states are sharded over data-parallel devices: `dhelix train --states zero1`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.models.common.training import Training
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan
from dhelix.passes.sharding.factors import ONE, Factors
from dhelix.runtime.sharding.placed_states import state_shardings
from dhelix.runtime.sharding.state_plan import agreed, sharding_plan


@dataclasses.dataclass(frozen=True)
class ShardedTraining(Training):
    """A `Training` whose `train_step` must run in `strand_interleave(sharding=states)`.

    Attributes:
      states: what `sharding_plan` takes.
    """

    states: Any = "dp"


def states_of(states: str | None, plan: str | Path | Plan | None) -> Any:
    """What `--states` and the sharding section of `--plan` say together, as `sharding_plan` takes it; None: nothing.

    Raises:
      DhelixError: both say different things, or a file cannot be read.
    """
    loaded = plan_files.load(plan) if isinstance(plan, str | Path) else plan
    if loaded is None or loaded.sharding is None:
        return states
    return agreed(states, loaded.sharding)


def with_states(training: Training, states: Any) -> ShardedTraining:
    """`training` with its states placed under a plan.

    Args:
      states: what `sharding_plan` takes.

    Raises:
      DhelixError: the plan does not fit the mesh, or a pipeline places its own states.
    """
    if type(training) is not Training:
        raise DhelixError(
            "model states are not sharded with --pp, because a pipeline places its own states; leave out --states, and "
            "remove the section `sharding` from a plan"
        )
    factors = sharding_plan(states).factors
    if isinstance(factors, Factors) and any(each not in (ONE, factors.mesh) for _, each in factors.states()):
        raise DhelixError(
            f"the models of `dhelix train` split states over all of the axis dp or not at all, but the plan says "
            f"{factors}; give `dhelix shard` such --factors, or use the plan in a step of your own"
        )
    shardings = state_shardings(training.abstract_state(), states)
    init = jax.jit(training.init, out_shardings=shardings)
    fields = {field.name: getattr(training, field.name) for field in dataclasses.fields(Training)}
    return ShardedTraining(**fields | {"state_shardings": shardings, "init": init}, states=states)
