"""How a train step shards its model states: factors, and the mesh axes that carry them out.

    plan = sharding_plan("zero1")                                  # all of the mesh axis "dp"
    plan = sharding_plan("mics", axes=("replica", "shard"))        # copies over "replica", shards over "shard"
    plan = sharding_plan(Factors(Factor(8, 2), ONE, ONE, Factor(8)), axes=("node", "gpu"))
    plan = sharding_plan("plan.json")                              # the sharding section of a plan file, with its axes

Data-parallel devices are split by one or several mesh axes, the major one first. A factor is carried out by the last of
these axes: with the axes ("replica", "shard") of sizes 4 and 8, states can be sharded over 1, 8 or 32 devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dhelix.passes.framework.manager import say_once
from dhelix.passes.hlo.constraints import Axes
from dhelix.passes.sharding.factors import GROUPED, STRATEGIES, Factor, Factors, ShardingError
from dhelix.passes.sharding.sharding_plan import ShardingPlan, axis_names, axis_sizes


@dataclass(frozen=True)
class StatePlan:
    """A plan for the model states of a step. `sharding_plan` makes one.

    Attributes:
      factors: the factors; a strategy's name if they follow from the mesh.
      axes: the data-parallel mesh axes, the major one first.
      placement, gpu_order: orders of nodes and of a node's GPUs, for `mesh_of`; None if any order will do.
    """

    factors: Factors | str
    axes: Axes = ("dp",)
    placement: tuple[str, ...] | None = None
    gpu_order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.factors} over {', '.join(self.axes)}"

    def on(self, mesh: Mapping[str, int]) -> SplitAxes:
        """The axes of `mesh` (sizes by name) that split each state.

        Raises:
          ShardingError: the mesh lacks an axis, has another number of devices, or no axes carry out a factor.
        """
        factors, sizes = self._factors_on(mesh)
        devices = math.prod(sizes)
        if factors.mesh.size != devices:
            raise ShardingError(
                f"the plan is for {factors.mesh.size} data-parallel devices ({factors.mesh}), but the mesh axes "
                f"{', '.join(self.axes)} have {devices}; make a plan for these devices (`dhelix shard --nodes N "
                '--gpus_per_node G`), or name a strategy such as "zero1"'
            )
        found = {name: self._carrying_out(name, factor, sizes) for name, factor in factors.states()}
        return SplitAxes(self.axes, **found)

    def section(self, mesh: Mapping[str, int]) -> ShardingPlan:
        """The section of a plan file that says the same, for a mesh (sizes by name). Raises what `on` raises."""
        self.on(mesh)
        factors, _ = self._factors_on(mesh)
        return ShardingPlan(factors, "inside", placement=self.placement, axes=self.axes, gpu_order=self.gpu_order)

    def _factors_on(self, mesh: Mapping[str, int]) -> tuple[Factors, list[int]]:
        """The factors, and the sizes of the axes."""
        self._check_axes(mesh)
        sizes = [mesh[axis] for axis in self.axes]
        if isinstance(self.factors, str):
            return Factors.named(self.factors, Factor(sizes[-1], math.prod(sizes) // sizes[-1])), sizes
        return self.factors, sizes

    def _check_axes(self, mesh: Mapping[str, int]) -> None:
        missing = [axis for axis in self.axes if axis not in mesh]
        if not missing:
            return
        count = math.prod(mesh.values())
        if isinstance(self.factors, Factors) and count % self.factors.mesh.size:
            raise ShardingError(
                f"the plan is for {self.factors.mesh.size} data-parallel devices ({self.factors.mesh}), but the mesh "
                f"has {count}; make a plan for these devices (`dhelix shard --nodes N --gpus_per_node G`)"
            )
        if len(self.axes) > 1:
            raise ShardingError(
                f"the plan is for the mesh axes {', '.join(self.axes)}, but the mesh has {', '.join(mesh)}: "
                "mesh_of(plan, tp=...) makes a mesh that fits, and says its axes"
            )
        raise ShardingError(
            f"the mesh has no axis {missing[0]!r}, only {', '.join(mesh)}; say which axes are data-parallel: "
            f"sharding_plan(..., axes=('{next(iter(mesh))}',)), or `dhelix shard --axes {next(iter(mesh))}`"
        )

    def _carrying_out(self, state: str, factor: Factor, sizes: Sequence[int]) -> Axes:
        for first in range(len(sizes) + 1):
            if math.prod(sizes[first:]) == factor.size:
                axes = zip(self.axes[first:], sizes[first:], strict=True)
                return tuple(axis for axis, size in axes if size > 1)  # an axis of one device splits nothing
        have = " x ".join(f"{axis}={size}" for axis, size in zip(self.axes, sizes, strict=True))
        raise ShardingError(
            f"{state} are sharded over {factor.size} devices, which the last of the axes {have} do not have; split the "
            "axis: mesh_of(plan, tp=...) makes a mesh that fits, and says its axes"
        )


@dataclass(frozen=True)
class SplitAxes:
    """The mesh axes that split model states, each the major axis first.

    Attributes:
      data: all data-parallel axes.
      parameters, gradients, optimizer: those of them that split this state.
    """

    data: Axes
    parameters: Axes = ()
    gradients: Axes = ()
    optimizer: Axes = ()

    @property
    def inside_out(self) -> Axes:
        """The axes of the optimizer states, in the order in which they split a dimension.

        Those of the parameters come first. So the share that a device updates lies within the share that it holds.
        """
        rest = [axis for axis in self.gradients if axis not in self.parameters]
        last = [axis for axis in self.optimizer if axis not in (*self.parameters, *rest)]
        return (*self.parameters, *rest, *last)


def sharding_plan(plan: StatePlan | Factors | str | Path | Any, axes: Sequence[str] | str | None = None) -> StatePlan:
    """Reads what the user says about sharded states.

    Args:
      plan: the name of a strategy, `Factors`, a `StatePlan`, or a plan with a sharding section, or its file.
      axes: the data-parallel mesh axes, the major one first; default: "dp", or those of `plan`.

    Raises:
      ShardingError: `plan` is none of these.
    """
    given = (axes,) if isinstance(axes, str) else None if axes is None else tuple(axes)
    if isinstance(plan, StatePlan):
        return replace(plan, axes=given or plan.axes)
    if isinstance(plan, str) and plan in STRATEGIES or isinstance(plan, Factors):
        return StatePlan(plan, given or ("dp",))
    if isinstance(plan, str) and not plan.endswith(".json"):
        raise ShardingError(f"sharding={plan!r} is neither a strategy ({', '.join(STRATEGIES)}) nor a plan's file")
    section = _section(plan)
    if section.split != "inside" and section.factors.optimizer.size > 1:
        line = f"the plan splits optimizer states {section.split} tensors, but dhelix splits inside each tensor"
        say_once(line, (line,))
    return StatePlan(section.factors, given or section.axes, section.placement, section.gpu_order)


def agreed(sharding: Any, section: ShardingPlan) -> StatePlan:
    """The plan in a plan file's section, if it says the same as the user.

    Args:
      sharding: what else the user said, as `sharding_plan` takes it; None: nothing. The name of a strategy and
        `Factors` say nothing about axes.

    Raises:
      ShardingError: both say different things.
    """
    of_file = sharding_plan(section)
    if sharding is None:
        return of_file
    said, known = sharding_plan(sharding), section.factors
    factors = said.factors
    if isinstance(factors, str):
        group = known.parameters if known.parameters.size > 1 else None
        factors = Factors.named(factors, known.mesh, group if factors in GROUPED else None)
    names_axes = not (isinstance(sharding, Factors) or sharding == said.factors)
    if factors != known or (names_axes and said.axes != of_file.axes):
        raise ShardingError(f"sharding= (--states) says {said}, but the plan says {of_file}: leave one of both out")
    return of_file


def _section(plan: Any) -> ShardingPlan:
    from dhelix.passes.plans import plan_files  # loading a plan needs what a strategy's name does not

    loaded = plan_files.load(plan) if isinstance(plan, str | Path) else plan
    section = getattr(loaded, "sharding", loaded)
    if not isinstance(section, ShardingPlan):
        raise ShardingError(
            f"{plan!r} says nothing about sharding; `dhelix shard --out plan.json` writes a plan that does"
        )
    return section


def mesh_of(
    plan: StatePlan | Factors | str | Path | Any,
    devices: Sequence[Any] | None = None,
    group: int | None = None,
    nodes: Sequence[str] | None = None,
    **others: int,
) -> tuple[Mesh, StatePlan]:
    """A mesh whose data-parallel axes fit a plan, and the plan with these axes.

    Args:
      plan: what `sharding_plan` takes.
      devices: devices in order, those of a node next to each other; default: all.
      group: for a strategy, the number of data-parallel devices over which states are sharded. "mics" and
        "zero++" need it.
      nodes: the names of the nodes of `devices`, in their order. With them, a plan file's placement is carried out.
      **others: further axes, within a data-parallel device: `tp=4`.

    Returns:
      The mesh, with the axes "dp" (or "dp_2", "dp_1", "dp_0", the last for neighbouring devices; or those that the plan
      names) and `others`; and the plan with these axes. `mesh_of("mics", group=4)` on 8 devices has dp_1=2 for the
      copies and dp_0=4 for the shards. A plan file's order of GPUs is carried out in each node.

    Raises:
      ShardingError: there are other devices than the plan needs, "mics" has no group, or a node is unknown.
    """
    devices = list(jax.devices() if devices is None else devices)
    inner = math.prod(others.values())
    if len(devices) % inner:
        raise ShardingError(f"{len(devices)} devices are not divisible by {others}")
    data, made = data_axes(plan, len(devices) // inner, group)
    assert isinstance(made.factors, Factors)  # data_axes turns a strategy's name into them
    axes = data | others
    grid = np.array(_placed(made, devices, made.factors.mesh, nodes)).reshape(*axes.values())
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes)), made


def data_axes(
    plan: StatePlan | Factors | str | Path, count: int, group: int | None = None
) -> tuple[dict[str, int], StatePlan]:
    """The mesh axes into which a plan splits data parallelism, the major one first, and the plan with these axes.

    Args:
      plan, group: as for `mesh_of`.
      count: the number of data-parallel devices.

    Returns:
      The sizes of the axes by name, as for `mesh_of`, and the plan.

    Raises:
      ShardingError: the plan needs another number of devices, "mics" has no group, or a plan of factors has one.
    """
    made = sharding_plan(plan)
    factors = made.factors
    if not isinstance(factors, str) and group is not None:
        raise ShardingError("a group is for a strategy, such as zero1; the plan's factors say their groups themselves")
    if isinstance(factors, str):
        if factors in GROUPED and group is None:
            raise ShardingError(
                f'"{factors}" needs the number of devices that hold one copy: mesh_of("{factors}", group=4)'
            )
        factors = Factors.named(factors, Factor(count), None if group is None else Factor(group))
    if factors.mesh.size != count:
        raise ShardingError(
            f"the plan is for {factors.mesh.size} data-parallel devices ({factors.mesh}), but there are {count}"
        )
    sizes = axis_sizes(factors)
    names = made.axes if len(made.axes) == len(sizes) else axis_names(len(sizes))
    return dict(zip(names, sizes, strict=True)), replace(made, factors=factors, axes=names)


def _placed(plan: StatePlan, devices: list[Any], mesh: Factor, nodes: Sequence[str] | None) -> list[Any]:
    """The devices in the order of the mesh: nodes as the plan places them, and the GPUs of each as it orders them."""
    of_node = len(devices) // mesh.nodes
    rows = [devices[first : first + of_node] for first in range(0, len(devices), of_node)]
    if plan.gpu_order is not None:
        if of_node != mesh.gpus:
            raise ShardingError("the plan orders single GPUs, so its mesh has no axes but the data-parallel ones")
        rows = [[row[n] for n in plan.gpu_order] for row in rows]
    if nodes is not None:
        if plan.placement is None:
            raise ShardingError("nodes= needs a plan that places nodes; make one with `dhelix shard --topology`")
        if sorted(nodes) != sorted(plan.placement):
            unlike = sorted(set(nodes) - set(plan.placement)) or sorted(set(plan.placement) - set(nodes))
            raise ShardingError(
                f"the plan places {', '.join(plan.placement)}; nodes= must name the same, each once"
                + (f", unlike {unlike[0]!r}" if unlike else "")
            )
        of_name = dict(zip(nodes, rows, strict=True))
        rows = [of_name[name] for name in plan.placement]
    return [device for row in rows for device in row]
