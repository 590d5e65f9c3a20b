"""A lowered step that works on sharded states: the program on which all other passes and the plain step are based."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.core import Tracer

from dhelix.passes import jax_compat
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import StageReport
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.constraints import mesh_axes, meshes
from dhelix.passes.sharding.factors import Factors, ShardingError
from dhelix.passes.sharding.states.state_axes import StateGroup
from dhelix.passes.sharding.states.state_sharding import StateSharding
from dhelix.runtime.compiler import lowering
from dhelix.runtime.sharding.nnx_objects import argument_paths
from dhelix.runtime.sharding.parameter_groups import group_numbers
from dhelix.runtime.sharding.state_plan import StatePlan, sharding_plan


class ShardedStates:
    """The plain programs of a step whose states are sharded.

    Attributes:
      plan: what `sharding_plan` takes; None if the step's states are not sharded.
    """

    def __init__(self, plan: Any, dump_to: str | Path | None = None):
        self.plan = None if plan is None else sharding_plan(plan)
        self._dump_to = dump_to
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def of(self, lowered: jax.stages.Lowered) -> tuple[jax.stages.Lowered, StageReport | None]:
        """The step before any pass makes strands, and the report of the pass that sharded its states."""
        return (lowered, None) if self.plan is None else sharded_program(lowered, self.plan, self._dump_to)

    def run(
        self,
        jitted: Any,
        args: Any,
        kwargs: Any,
        kind: Callable[[Any, Any], Hashable],
        separate: Callable[[Any, Any], Any],
    ) -> Any:
        """Runs the plain step.

        Args:
          jitted: the step as `jax.jit` returned it.
          kind: returns a key of (args, kwargs), equal for arguments with which the same program runs.
          separate: splits (args, kwargs) into static values and (args, kwargs) without them.
        """
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs)))
        if self.plan is None or traced:  # inside another transformation, the step becomes part of it unchanged
            return jitted(*args, **kwargs)
        key = kind(args, kwargs)
        if key not in self._compiled:
            self._compiled[key] = self.of(jitted.lower(*args, **kwargs))[0].compile()
        _, (args, kwargs) = separate(args, kwargs)
        return self._compiled[key](*args, **kwargs)

    def clear(self) -> None:
        self._compiled.clear()


def sharded_program(
    lowered: jax.stages.Lowered, plan: Any, dump_to: str | Path | None = None
) -> tuple[jax.stages.Lowered, StageReport | None]:
    """Returns a lowered step with its states sharded, and the report of the pass that did it.

    Args:
      lowered: the step, lowered for states that `shard_state` has placed.
      plan: what `sharding_plan` takes.
      dump_to: folder for the HLO before and after the pass.

    Returns:
      The step and the report; the unchanged step and None if the plan shards nothing.

    Raises:
      DhelixError: the mesh does not fit the plan, or no state is placed.
    """
    made = sharding_plan(plan)
    program = lowering.hlo_bytes(lowered)
    mesh = _mesh(HloModule.from_bytes(program), made)
    axes, groups = made.on(mesh), _groups(lowered, made, mesh)
    if not any(each.optimizer for each in (axes, *(group.axes for group in groups))):
        return lowered, None
    one = StateSharding(axes, groups, f"the others ({_kind(made.factors)})")
    name = lowering.module_name(lowered)
    after, report = PassManager((one,), strict=True, dump_to=dump_to).run(Stage.LOWERED, program, name)
    return (lowered if after is None else lowering.with_hlo(lowered, after)), report


def _groups(lowered: jax.stages.Lowered, plan: StatePlan, mesh: Mapping[str, int]) -> tuple[StateGroup, ...]:
    """The groups of a plan, with the arguments of the program that belong to them."""
    if not plan.groups:
        return ()
    numbers = group_numbers([name for name, _ in plan.groups], argument_paths(lowered.args_info))
    kept = [numbers[n] for n in jax_compat.kept_arguments(lowered)]
    found = []
    for n, ((name, factors), axes) in enumerate(zip(plan.groups, plan.of_groups(mesh), strict=True)):
        ours = frozenset(number for number, at in enumerate(kept) if at == n)
        found.append(StateGroup(f"{name} ({_kind(factors)})", axes, ours))
    return tuple(found)


def _kind(factors: Factors | str) -> str:
    return factors if isinstance(factors, str) else factors.strategy or str(factors)


def _mesh(module: HloModule, plan: StatePlan) -> dict[str, int]:
    """The sizes of the axes of the program's mesh that fits the plan, or else of any mesh."""
    every = [{axis.strip('"'): size for axis, size in mesh_axes(module, name).items()} for name in meshes(module)]
    known = [mesh for mesh in every if mesh]  # a program of one device may have a mesh without axes
    if not known:
        raise ShardingError(
            "the step's arguments are on no mesh; place the state with dhelix.shard_state(state, plan, mesh)"
        )
    fits = [mesh for mesh in known if set(plan.axes) <= mesh.keys()]
    return fits[0] if fits else known[0]
