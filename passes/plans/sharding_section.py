"""The section `sharding` of a plan file, as it stands in JSON. `plan_files.py` reads it.

"sharding": {"mesh": [8, 1], "parameters": [8, 1], "gradients": [8, 1], "optimizer": [8, 1], "split": "inside",
             "axes": ["dp"], "groups": {"embedding": {"parameters": [1, 1], "gradients": [1, 1], ...}}}
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from dhelix.passes.sharding.factors import Factor, Factors, ShardingError
from dhelix.passes.sharding.sharding_plan import ShardingPlan
from dhelix.profiles.files.codec import Bytes, Count, Text

_Factor = tuple[Count, Count]  # GPUs of a node, nodes


class _Factors(Struct, forbid_unknown_fields=True):
    parameters: _Factor
    gradients: _Factor
    optimizer: _Factor

    def on(self, mesh: _Factor) -> Factors:
        return Factors(Factor(*mesh), Factor(*self.parameters), Factor(*self.gradients), Factor(*self.optimizer))


class ShardingSection(Struct, forbid_unknown_fields=True):
    """The fields of the section (`passes/sharding/sharding_plan.py`)."""

    mesh: _Factor
    parameters: _Factor
    gradients: _Factor
    optimizer: _Factor
    split: Text
    axes: list[Text] = []
    placement: list[Text] | None = None
    gpu_order: list[Bytes] | None = None
    groups: dict[str, Any] = {}

    def plan(self) -> ShardingPlan:
        """The section as a plan. Raises ShardingError if its values do not fit each other."""
        factors = _Factors(self.parameters, self.gradients, self.optimizer).on(self.mesh)
        groups = []
        for name, each in self.groups.items():
            try:
                groups.append((name, msgspec.convert(each, _Factors).on(self.mesh)))
            except (ShardingError, msgspec.ValidationError) as error:
                raise ShardingError(f"group {name!r}: {error}") from None
        placement = None if self.placement is None else tuple(map(str, self.placement))
        order = None if self.gpu_order is None else tuple(self.gpu_order)
        return ShardingPlan(factors, str(self.split), placement, tuple(map(str, self.axes)), order, tuple(groups))
