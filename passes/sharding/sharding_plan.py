"""What an executor needs to know about sharding: factors, mesh axes, split and placement. A section of plan files.

    "sharding": {"mesh": [8, 128], "parameters": [1, 1], "gradients": [1, 1], "optimizer": [8, 1], "split": "inside",
                 "axes": ["dp_1", "dp_0"], "placement": ["node-7", "node-3", ...], "gpu_order": [0, 1, 4, 5, ...]}

A factor is written as [GPUs of a node, nodes]. A mesh axis is split where a factor ends, so the example needs two axes:
dp_0 has the 8 GPUs of the optimizer's factor, and dp_1 has the 128 nodes. `passes/plans/plan_files.py` reads and writes
the section.

Groups of parameters may have other factors. A name is matched against the path of a parameter
(`runtime/sharding/parameter_groups.py`), and the first that matches counts:

    "groups": {"embedding": {"parameters": [1, 1], "gradients": [1, 1], "optimizer": [8, 128]}}
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dhelix.passes.sharding.factors import STATES, Factors, ShardingError
from dhelix.passes.sharding.sizes import check_names
from dhelix.passes.sharding.step_times import SPLITS


def axis_sizes(*each: Factors) -> tuple[int, ...]:
    """The sizes of the fewest mesh axes that carry out all of these factors, the major axis first.

    Raises:
      ShardingError: they need axes of which one does not divide the next.
    """
    sizes = sorted({1, *(factor.size for factors in each for _, factor in [*factors.states(), ("", factors.mesh)])})
    for before, after in pairwise(sizes):
        if after % before:
            raise ShardingError(
                f"no mesh axes have parts of {before} and of {after} devices at once; choose factors for the groups "
                "of which each divides the next"
            )
    steps = [after // before for before, after in pairwise(sizes)]
    return tuple(step for step in reversed(steps) if step > 1) or (1,)


def axis_names(count: int) -> tuple[str, ...]:
    """Names of `count` data-parallel mesh axes: "dp", or "dp_2", "dp_1", "dp_0"."""
    return ("dp",) if count == 1 else tuple(f"dp_{n}" for n in reversed(range(count)))


def check_group(name: object) -> None:
    """Raises ShardingError if this cannot be the name of a group, which matches parts of paths."""
    if not isinstance(name, str) or not all(name.split("/")):
        raise ShardingError(
            f"group {name!r} has no name; give parts of the path of parameters, joined by slashes: 'layers/*norm'"
        )
    if name.split("/")[0].isdigit():
        raise ShardingError(
            f"group {name!r} begins with a number, which arguments of a step have as well; put the name before it: "
            "'layers/0'"
        )


@dataclass(frozen=True)
class ShardingPlan:
    """How model states are sharded.

    Attributes:
      factors: the mesh, and the part of it over which each state is sharded.
      split: whether optimizer states are split `between` tensors or `inside` them (`owners.py`).
      placement: the names of nodes in the order of the mesh; None if any order will do.
      axes: the names of the data-parallel mesh axes, the major one first; empty means those of `axis_names`.
      gpu_order: the numbers of a node's GPUs in the order of the mesh; None if any order will do.
      groups: names and factors of parameters that are sharded otherwise, the first that matches a path first.

    Raises:
      ShardingError: the split is unknown, the axes are too few, an order has another length or a name twice, or a group
        has another mesh.
    """

    factors: Factors
    split: str = SPLITS[0]
    placement: tuple[str, ...] | None = None
    axes: tuple[str, ...] = ()
    gpu_order: tuple[int, ...] | None = None
    groups: tuple[tuple[str, Factors], ...] = ()

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ShardingError(f"split {self.split!r} is unknown; use one of {', '.join(SPLITS)}")
        for name, factors in self.groups:
            check_group(name)
            if factors.mesh != self.factors.mesh:
                raise ShardingError(
                    f"group {name!r} is on a mesh of {factors.mesh}, but the other parameters on {self.factors.mesh}; "
                    "a plan has one mesh of data-parallel devices"
                )
        check_names(name for name, _ in self.groups)
        sizes = axis_sizes(self.factors, *(factors for _, factors in self.groups))
        if not self.axes:
            object.__setattr__(self, "axes", axis_names(len(sizes)))
        check_names(self.axes)
        if len(self.axes) < len(sizes):
            raise ShardingError(
                f"{', '.join(self.axes)} cannot carry out {self.all_factors}: name {len(sizes)} mesh axes, for sizes "
                f"{' x '.join(map(str, sizes))}"
            )
        mesh = self.factors.mesh
        if self.placement is not None:
            check_names(self.placement)
            if len(self.placement) != mesh.nodes:
                raise ShardingError(
                    f"{len(self.placement)} nodes are placed, of {mesh.nodes} in the mesh; name each once"
                )
        if self.gpu_order is not None and sorted(self.gpu_order) != list(range(mesh.gpus)):
            raise ShardingError(f"the order of GPUs names each of 0 to {mesh.gpus - 1} once")

    @property
    def all_factors(self) -> str:
        """The factors of the plan and of its groups in words."""
        return "; ".join([str(self.factors), *(f"{name}: {factors}" for name, factors in self.groups)])

    def as_json(self) -> dict[str, Any]:
        """The section as JSON values."""
        found: dict[str, Any] = {"mesh": _pair(self.factors, "mesh")}
        found |= {name: _pair(self.factors, name) for name in STATES}
        found |= {"split": self.split, "axes": list(self.axes)}
        if self.placement is not None:
            found["placement"] = list(self.placement)
        if self.gpu_order is not None:
            found["gpu_order"] = list(self.gpu_order)
        if self.groups:
            found["groups"] = {name: {state: _pair(one, state) for state in STATES} for name, one in self.groups}
        return found


def _pair(factors: Factors, name: str) -> list[int]:
    factor = getattr(factors, name)
    return [factor.gpus, factor.nodes]
