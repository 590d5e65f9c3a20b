"""How a train step shards its model states: factors, and the mesh axes that carry them out.

    plan = sharding_plan("zero1")                                  # all of the mesh axis "dp"
    plan = sharding_plan("mics", axes=("replica", "shard"))        # copies over "replica", shards over "shard"
    plan = sharding_plan(Factors(Factor(8, 2), ONE, ONE, Factor(8)), axes=("node", "gpu"))
    plan = sharding_plan("plan.json")                              # the sharding section of a plan file, with its axes
    plan = sharding_plan("zero3", groups={"embedding": "zero1"})   # groups of parameters, by their paths

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
from dhelix.passes.sharding.sharding_plan import ShardingPlan, axis_names, axis_sizes, check_group
from dhelix.passes.sharding.states.state_axes import SplitAxes


@dataclass(frozen=True)
class StatePlan:
    """A plan for the model states of a step. `sharding_plan` makes one.

    Attributes:
      factors: the factors; a strategy's name if they follow from the mesh.
      axes: the data-parallel mesh axes, the major one first.
      placement, gpu_order: orders of nodes and of a node's GPUs, for `mesh_of`; None if any order will do.
      groups: names (`parameter_groups.py`) and factors of parameters that are sharded otherwise. The first that matches
        counts.
    """

    factors: Factors | str
    axes: Axes = ("dp",)
    placement: tuple[str, ...] | None = None
    gpu_order: tuple[int, ...] | None = None
    groups: tuple[tuple[str, Factors | str], ...] = ()

    def __str__(self) -> str:
        groups = "".join(f"; {name}: {factors}" for name, factors in self.groups)
        return f"{self.factors} over {', '.join(self.axes)}{groups}"

    def of_groups(self, mesh: Mapping[str, int]) -> list[SplitAxes]:
        """The axes of `mesh` (sizes by name) that split the states of each group. Raises what `on` raises."""
        found = []
        for name, factors in self.groups:
            try:
                found.append(replace(self, factors=factors, groups=()).on(mesh))
            except ShardingError as error:
                raise ShardingError(f"group {name!r}: {error}") from None
        return found

    def on(self, mesh: Mapping[str, int]) -> SplitAxes:
        """The axes of `mesh` (sizes by name) that split each state of the parameters that are in no group.

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
        self.of_groups(mesh)
        factors, sizes = self._factors_on(mesh)
        groups = tuple((name, _on_sizes(each, sizes)) for name, each in self.groups)
        return ShardingPlan(factors, "inside", self.placement, self.axes, self.gpu_order, groups)

    def _factors_on(self, mesh: Mapping[str, int]) -> tuple[Factors, list[int]]:
        """The factors, and the sizes of the axes."""
        self._check_axes(mesh)
        sizes = [mesh[axis] for axis in self.axes]
        return _on_sizes(self.factors, sizes), sizes

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


def _on_sizes(factors: Factors | str, sizes: Sequence[int]) -> Factors:
    """Factors, or those that a strategy has on mesh axes of these sizes."""
    if isinstance(factors, str):
        return Factors.named(factors, Factor(sizes[-1], math.prod(sizes) // sizes[-1]))
    return factors


def sharding_plan(
    plan: StatePlan | Factors | str | Path | Any,
    axes: Sequence[str] | str | None = None,
    groups: Mapping[str, Factors | str] | None = None,
) -> StatePlan:
    """Reads what the user says about sharded states.

    Args:
      plan: the name of a strategy, `Factors`, a `StatePlan`, or a plan with a sharding section, or its file.
      axes: the data-parallel mesh axes, the major one first; default: "dp", or those of `plan`.
      groups: strategies or `Factors` of parameters that are sharded otherwise; default: those of `plan`. A key is a
        part of the parameter's path in the state, such as "embedding" or "layers/*norm": parts that are joined by
        slashes, and may have `*` and `?`. The first key that matches counts.

    Raises:
      ShardingError: `plan` is none of these, or a group has no name or is no strategy.
    """
    made = _sharding_plan(plan, (axes,) if isinstance(axes, str) else None if axes is None else tuple(axes))
    return made if groups is None else replace(made, groups=_checked(groups))


def _checked(groups: Any) -> tuple[tuple[str, Factors | str], ...]:
    if not isinstance(groups, Mapping):
        raise ShardingError(f"groups={groups!r} maps no names to strategies; write groups={{'embedding': 'zero1'}}")
    for name, factors in groups.items():
        check_group(name)
        if not (isinstance(factors, Factors) or (isinstance(factors, str) and factors in STRATEGIES)):
            raise ShardingError(
                f"group {name!r}: {factors!r} is neither a strategy ({', '.join(STRATEGIES)}) nor Factors"
            )
    return tuple(groups.items())


def _sharding_plan(plan: Any, given: Axes | None) -> StatePlan:
    if isinstance(plan, StatePlan):
        return replace(plan, axes=given or plan.axes)
    if isinstance(plan, str) and plan in STRATEGIES or isinstance(plan, Factors):
        return StatePlan(plan, given or ("dp",))
    if isinstance(plan, str) and not plan.endswith(".json"):
        first, *others = plan.split(",")
        if others and first in STRATEGIES:  # as `dhelix train --states` takes it
            pairs = (other.partition("=") for other in others)
            groups = ", ".join(f"{name!r}: {value or 'zero1'!r}" for name, _, value in pairs)
            raise ShardingError(
                f"sharding={plan!r}: this is the form of --states; in Python, write sharding="
                f"dhelix.sharding_plan({first!r}, groups={{{groups}}})"
            )
        raise ShardingError(f"sharding={plan!r} is neither a strategy ({', '.join(STRATEGIES)}) nor a plan's file")
    section = _section(plan)
    if section.split != "inside" and section.factors.optimizer.size > 1:
        line = f"the plan splits optimizer states {section.split} tensors, but dhelix splits inside each tensor"
        say_once(line, (line,))
    return StatePlan(section.factors, given or section.axes, section.placement, section.gpu_order, section.groups)


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
    said = sharding_plan(sharding)
    names_axes = not (isinstance(sharding, Factors) or sharding == said.factors)
    same = [name for name, _ in said.groups] == [name for name, _ in section.groups] and all(
        _agree(one, known)
        for one, known in zip(
            [said.factors, *(factors for _, factors in said.groups)],
            [section.factors, *(factors for _, factors in section.groups)],
            strict=True,
        )
    )
    if not same or (names_axes and said.axes != of_file.axes):
        raise ShardingError(f"sharding= (--states) says {said}, but the plan says {of_file}: leave one of both out")
    return of_file


def _agree(said: Factors | str, known: Factors) -> bool:
    if isinstance(said, str):
        group = known.parameters if known.parameters.size > 1 else None
        said = Factors.named(said, known.mesh, group if said in GROUPED else None)
    return said == known


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
      group: for strategies, also those of groups of parameters, the number of data-parallel devices over which states
        are sharded. "mics" and "zero++" need it.
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
    strategies = any(isinstance(each, str) for each in (made.factors, *(each for _, each in made.groups)))
    if group is not None and not strategies:
        raise ShardingError("a group is for a strategy, such as zero1; the plan's factors say their groups themselves")
    factors = _of_devices(made.factors, count, group)
    groups = tuple((name, _of_devices(one, count, group)) for name, one in made.groups)
    sizes = axis_sizes(factors, *(one for _, one in groups))
    names = made.axes if len(made.axes) == len(sizes) else axis_names(len(sizes))
    return dict(zip(names, sizes, strict=True)), replace(made, factors=factors, axes=names, groups=groups)


def _of_devices(factors: Factors | str, count: int, group: int | None) -> Factors:
    """Factors over `count` data-parallel devices, or those that a strategy has there. Raises as `data_axes`."""
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
    return factors


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
