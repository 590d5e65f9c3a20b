"""What an executor needs to know about sharding: factors, split and placement. It is a section of plan files.

    "sharding": {"mesh": [8, 128], "parameters": [1, 1], "gradients": [1, 1], "optimizer": [8, 1],
                 "split": "between", "placement": ["node-7", "node-3", ...]}

A factor is written as [GPUs of a node, nodes]. `passes/plans/plan_files.py` reads and writes the section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dhelix.passes.sharding.factors import STATES, Factors, ShardingError
from dhelix.passes.sharding.sizes import check_names
from dhelix.passes.sharding.step_times import SPLITS


@dataclass(frozen=True)
class ShardingPlan:
    """How model states are sharded.

    Attributes:
      factors: the mesh, and the part of it over which each state is sharded.
      split: whether optimizer states are split `between` tensors or `inside` them (`owners.py`).
      placement: the names of nodes in the order of the mesh; None if any order will do.

    Raises:
      ShardingError: the split is unknown, or the placement has another number of nodes or one of them twice.
    """

    factors: Factors
    split: str = SPLITS[0]
    placement: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ShardingError(f"split {self.split!r} is unknown; use one of {', '.join(SPLITS)}")
        if self.placement is not None:
            check_names(self.placement)
            if len(self.placement) != self.factors.mesh.nodes:
                raise ShardingError(
                    f"{len(self.placement)} nodes are placed, of {self.factors.mesh.nodes} in the mesh; name each once"
                )

    def as_json(self) -> dict[str, Any]:
        """The section as JSON values."""
        found: dict[str, Any] = {"mesh": _pair(self.factors, "mesh")}
        found |= {name: _pair(self.factors, name) for name in STATES}
        found["split"] = self.split
        if self.placement is not None:
            found["placement"] = list(self.placement)
        return found


def _pair(factors: Factors, name: str) -> list[int]:
    factor = getattr(factors, name)
    return [factor.gpus, factor.nodes]
