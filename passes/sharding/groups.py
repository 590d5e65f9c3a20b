"""Factors for each group of parameters: embedding, layers, experts, adapters. This goes beyond AMSP.

The paper has one triple of factors for the whole model. But experts have a data-parallel mesh of their own, smaller by
the degree of expert parallelism. The frozen base of adapters has neither gradients nor optimizer states. And an
embedding is needed once in a micro-batch.

    groups = [ParameterGroup("layers", layers, Factor(8, 4)), ParameterGroup("experts", experts, Factor(8, 1))]
    solved = solve(groups, times, limit=60e9, others=8e9)
    solved["experts"].factors
    sharding_plan(plan_of(solved, others="layers"))    # carries it out, if all groups are on one mesh

Each group chooses one of its admissible factors. The sum of memory is limited, and the sum of seconds is least. This is
the multiple-choice knapsack problem: with g groups of n choices there are n ** g combinations. OR-tools' CP-SAT solves
it exactly, on one thread and with a fixed seed, so that equal input gives equal plans. Afterwards it takes the least
memory among plans that are as fast to within `planner.TIE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.sharding.collective_times import CollectiveTimes
from dhelix.passes.sharding.factors import Factor, ShardingError, admissible
from dhelix.passes.sharding.overlap import Overlap
from dhelix.passes.sharding.planner import TIE, Candidate, evaluate
from dhelix.passes.sharding.sharding_plan import ShardingPlan
from dhelix.passes.sharding.sizes import check_names
from dhelix.passes.sharding.step_times import Job

_NANO = 1e9
_BLOCK = 1024.0  # bytes: the unit of memory in the model
_EFFORT = 60.0  # deterministic seconds


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are sharded alike.

    Attributes:
      name: readable name.
      job: sizes of this group alone, its bytes per parameter, and the batch.
      mesh: its data-parallel devices. Those of experts are fewer than those of the other layers.
    """

    name: str
    job: Job
    mesh: Factor


def choices(group: ParameterGroup, times: CollectiveTimes, overlap: Overlap | None = None) -> list[Candidate]:
    """All candidates of a group that no other candidate beats in both memory and time."""
    found = [evaluate(group.job, factors, times, overlap) for factors in admissible(group.mesh)]
    found.sort(key=lambda c: (held(c), c.value("exposed")))
    kept: list[Candidate] = []
    for candidate in found:
        if not kept or candidate.value("exposed") < kept[-1].value("exposed"):
            kept.append(candidate)
    return kept


def held(candidate: Candidate) -> float:
    """Bytes of a group: states and gathered parameters. Activations and logits are counted once for the model."""
    return candidate.memory.states + candidate.memory.gathered


def solve(
    groups: Sequence[ParameterGroup],
    times: CollectiveTimes,
    limit: float,
    others: float = 0.0,
    overlap: Overlap | None = None,
) -> dict[str, Candidate]:
    """The best candidate of each group, by the group's name.

    Args:
      limit: bytes of memory of a device.
      others: bytes that no factor changes: activations, unreduced gradients, logits.

    Raises:
      ShardingError: nothing fits, or a name occurs twice.
      DhelixError: OR-tools is missing.
    """
    check_names(group.name for group in groups)
    options = {group.name: choices(group, times, overlap) for group in groups}
    least = sum(held(found[0]) for found in options.values()) + others
    if least > limit:
        raise ShardingError(
            f"nothing fits into {limit / 1e9:.1f} GB: the groups and the rest need at least {least / 1e9:.1f} GB, "
            f"{(least - limit) / 1e9:.1f} GB too much"
        )
    room = math.floor((limit - others) / _BLOCK) + len(groups)  # each group's memory is rounded up
    seconds = {name: [round(_NANO * c.value("exposed")) for c in found] for name, found in options.items()}
    blocks = {name: [math.ceil(held(c) / _BLOCK) for c in found] for name, found in options.items()}
    chosen = _solve(seconds, blocks, room)
    fastest = sum(seconds[name][n] for name, n in chosen.items())
    chosen = _solve(blocks, seconds, math.floor((1.0 + TIE) * fastest), (blocks, room))
    return {name: options[name][n] for name, n in chosen.items()}


def plan_of(solved: Mapping[str, Candidate], others: str) -> ShardingPlan:
    """The plan that carries out what `solve` chose. `dhelix.sharding_plan` takes it.

    Args:
      solved: the candidate of each group. The group's name must match the paths of its parameters, as
        `runtime/sharding/parameter_groups.py` says.
      others: the group of all parameters whose path no other group's name matches.

    Raises:
      ShardingError: there is no such group, or groups are on different meshes.
    """
    if others not in solved:
        raise ShardingError(f"no group is called {others!r}; choose from {', '.join(solved)}")
    groups = tuple((name, candidate.factors) for name, candidate in solved.items() if name != others)
    return ShardingPlan(solved[others].factors, "inside", groups=groups)


type _Numbers = Mapping[str, Sequence[int]]


def _solve(least: _Numbers, limited: _Numbers, room: int, also: tuple[_Numbers, int] | None = None) -> dict[str, int]:
    """The number of the choice of each group: the sum of `least` is least, and that of `limited` at most `room`."""
    cp_model = _solver()
    model = cp_model.CpModel()
    taken = {name: [model.new_bool_var(f"{name} {n}") for n in range(len(row))] for name, row in least.items()}
    for row in taken.values():
        model.add_exactly_one(row)

    def total(numbers: _Numbers) -> Any:
        return sum(number * var for name, row in taken.items() for number, var in zip(numbers[name], row, strict=True))

    for numbers, bound in ((limited, room), *([also] if also else [])):
        model.add(total(numbers) <= bound)
    model.minimize(total(least))
    engine = cp_model.CpSolver()
    engine.parameters.num_workers = 1
    engine.parameters.random_seed = 0
    engine.parameters.max_deterministic_time = _EFFORT
    if engine.solve(model) != cp_model.OPTIMAL:
        raise ShardingError("the factors of the groups were not found: please report this with the groups")
    return {name: next(n for n, var in enumerate(row) if engine.value(var)) for name, row in taken.items()}


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise DhelixError("factors of groups need OR-tools: pip install 'dhelix[plan]'") from None
    return cp_model
