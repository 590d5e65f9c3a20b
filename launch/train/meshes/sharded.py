"""A train step whose model states are sharded over data-parallel devices: `dhelix train --states zero1`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from dhelix.models.common.training import Training
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan
from dhelix.passes.sharding.factors import STRATEGIES, ShardingError
from dhelix.runtime.sharding.placed_states import state_shardings
from dhelix.runtime.sharding.state_plan import StatePlan, agreed, sharding_plan


@dataclasses.dataclass(frozen=True)
class ShardedTraining(Training):
    """A `Training` whose `train_step` must run in `strand_interleave(sharding=states)`.

    Attributes:
      states: how model states are sharded. None: as `state_shardings` says, without a plan.
    """

    states: StatePlan | None = None


def states_of(states: str | None, plan: str | Path | Plan | None) -> Any:
    """What `--states` and the sharding section of `--plan` say together, as `sharding_plan` takes it; None: nothing.

    Args:
      states: a strategy or a plan file, perhaps with strategies of groups of parameters: "zero3,embedding=zero1".
      plan: the plan, or its file.

    Raises:
      DhelixError: both say different things, or a file cannot be read.
    """
    said = None if states is None else _with_groups(states)
    loaded = plan_files.load(plan) if isinstance(plan, str | Path) else plan
    if loaded is None or loaded.sharding is None:
        return said
    return agreed(said, loaded.sharding)


def _with_groups(states: str) -> str | StatePlan:
    first, *others = states.split(",")
    if first not in STRATEGIES and not first.endswith(".json"):
        raise ShardingError(f"--states {states}: {first} is neither {', '.join(STRATEGIES)} nor a plan file (.json)")
    if not others:
        return states
    groups: dict[str, str] = {}
    for text in others:
        name, equals, strategy = text.partition("=")
        if not equals or name in groups:
            raise ShardingError(f"--states {states}: write groups of parameters once each, as zero3,embedding=zero1")
        groups[name] = strategy
    return sharding_plan(first, groups=groups)


def with_states(training: Training, states: Any) -> ShardedTraining:
    """`training` with its states placed under a plan. A pipeline stays a pipeline.

    Args:
      states: what `sharding_plan` takes, such as "zero1".

    Raises:
      DhelixError: the plan does not fit the mesh.
    """
    plan = sharding_plan(states)
    shardings = state_shardings(training.abstract_state(), plan)
    init = jax.jit(training.init, out_shardings=shardings)
    kind = type(training) if isinstance(training, ShardedTraining) else ShardedTraining
    return kind(**vars(training) | {"state_shardings": shardings, "init": init, "states": plan})
