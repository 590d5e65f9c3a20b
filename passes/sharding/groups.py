"""Factors for each group of parameters: embedding, layers, experts, adapters. This goes beyond AMSP.

The paper has one triple of factors for the whole model. But experts have a data-parallel mesh of their own, smaller by
the degree of expert parallelism. The frozen base of adapters has neither gradients nor optimizer states. And an
embedding is needed once in a micro-batch.

    groups = [part_of(job, embedding, Factor(8, 4)), part_of(job, others, Factor(8, 4))]     # sizes: `ModelSizes.only`
    planned = plan_groups(job, groups, times, limit=80e9)
    planned.of_group["embedding"].factors; planned.best.times.exposed
    planned.alike.best            # one triple for all, counted in the same way
    planned.plan(axes=("dp",))    # carries it out, if all groups are on one mesh; `sharding_plan` takes it

Each group chooses one of its admissible factors. The sum of memory is limited, and the sum of seconds is least. This is
the multiple-choice knapsack problem: with g groups of n choices there are n ** g combinations. OR-tools' CP-SAT solves
it exactly, on one thread and with a fixed seed, so that equal input gives equal plans. Afterwards it takes the least
memory among plans that are as fast to within `planner.TIE`.

Groups are counted one by one, so that memory and seconds add up. A group hides its collectives behind its share of the
compute (`Job.share`). For equal factors, the sum is nearly that of the whole model: each group fills buckets of its
own, and a single strand may be counted at the layers and at the ends at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.hlo.constraints import Axes
from dhelix.passes.sharding import memory as memories
from dhelix.passes.sharding.collective_times import CollectiveTimes
from dhelix.passes.sharding.factors import Factor, Factors, ShardingError, admissible
from dhelix.passes.sharding.memory import Memory
from dhelix.passes.sharding.overlap import Overlap
from dhelix.passes.sharding.planner import TIE, Candidate, Planned, choose, evaluate, in_words, known
from dhelix.passes.sharding.sharding_plan import ShardingPlan, axis_sizes
from dhelix.passes.sharding.sizes import ModelSizes, StateBytes, check_names
from dhelix.passes.sharding.step_times import Job, Part, StepTimes

OTHERS = "the others"
"""The name of the group of all parameters that no key matches."""

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
      choices: the factors to choose from; None: all admissible ones.
    """

    name: str
    job: Job
    mesh: Factor
    choices: tuple[Factors, ...] | None = None

    @property
    def every(self) -> tuple[Factors, ...]:
        """All factors to choose from."""
        return tuple(admissible(self.mesh)) if self.choices is None else self.choices


def part_of(
    job: Job, sizes: ModelSizes, mesh: Factor, kept: StateBytes | None = None, choices: Sequence[Factors] | None = None
) -> ParameterGroup:
    """A group of the parameters of a model.

    Args:
      job: the whole model's.
      sizes: the group, as `ModelSizes.only` makes it. Its name is the group's.
      kept: bytes per parameter of the group; None: as in the whole model.
      choices: as in `ParameterGroup`.
    """
    whole, layer = job.sizes.layer_parameters, sizes.layer_parameters
    own = replace(
        job,
        sizes=sizes,
        kept=kept or job.kept,
        rest=None,
        share=sizes.parameters / job.sizes.parameters,
        layer_share=layer / whole if layer else 1.0,
    )
    return ParameterGroup(sizes.name, own, mesh, None if choices is None else tuple(choices))


def choices(
    group: ParameterGroup, times: CollectiveTimes, overlap: Overlap | None = None, objective: str = "exposed"
) -> list[Candidate]:
    """All candidates of a group that no other candidate beats in both memory and time."""
    found = [evaluate(group.job, factors, times, overlap) for factors in group.every]
    found.sort(key=lambda c: (held(c), c.value(objective)))
    kept: list[Candidate] = []
    for candidate in found:
        if not kept or candidate.value(objective) < kept[-1].value(objective):
            kept.append(candidate)
    return kept


def held(candidate: Candidate) -> float:
    """Bytes of a group: states, gathered parameters and gradients that wait for their reduction.

    Activations and logits are counted once for the model.
    """
    return candidate.memory.states + candidate.memory.gathered + candidate.memory.unreduced


def solve(
    groups: Sequence[ParameterGroup],
    times: CollectiveTimes,
    limit: float,
    others: float = 0.0,
    overlap: Overlap | None = None,
    objective: str = "exposed",
) -> dict[str, Candidate]:
    """The best candidate of each group, by the group's name.

    Args:
      limit: bytes of memory of a device.
      others: bytes that no factor changes: activations and logits.
      objective: one of `planner.OBJECTIVES`.

    Raises:
      ShardingError: nothing fits, or a name occurs twice.
      DhelixError: OR-tools is missing.
    """
    check_names(group.name for group in groups)
    unlike = [pair for pair in combinations(groups, 2) if not _always_together(*pair)]
    tied = {group.name for pair in unlike for group in pair}
    options = {}
    for group in groups:
        if group.name in tied:  # what a smaller and faster choice beats may be what fits another group
            options[group.name] = [evaluate(group.job, factors, times, overlap) for factors in group.every]
        else:
            options[group.name] = choices(group, times, overlap, objective)
    least = sum(min(map(held, found)) for found in options.values()) + others
    if least > limit:
        raise ShardingError(
            f"nothing fits into {in_words(limit)}: the groups and the rest need at least {in_words(least)}, "
            f"{in_words(least - limit)} too much"
        )
    room = math.floor((limit - others) / _BLOCK) + len(groups)  # each group's memory is rounded up
    seconds = {name: [round(_NANO * c.value(objective)) for c in found] for name, found in options.items()}
    blocks = {name: [math.ceil(held(c) / _BLOCK) for c in found] for name, found in options.items()}
    apart = [
        ((a.name, n), (b.name, k))
        for a, b in unlike
        for n, one in enumerate(options[a.name])
        for k, other in enumerate(options[b.name])
        if not _on_one_mesh(one.factors, other.factors)
    ]
    chosen = _solve(seconds, [(blocks, room)], apart)
    fastest = sum(seconds[name][n] for name, n in chosen.items())
    chosen = _solve(blocks, [(seconds, math.floor((1.0 + TIE) * fastest)), (blocks, room)], apart)
    return {name: options[name][n] for name, n in chosen.items()}


def _always_together(one: ParameterGroup, other: ParameterGroup) -> bool:
    """Whether any factors of both can be carried out at once. Groups on different meshes are no part of one plan."""
    if one.mesh != other.mesh:
        return True
    sizes = {factor.size for each in (*one.every, *other.every) for _, factor in each.states()}
    return all(max(pair) % min(pair) == 0 for pair in combinations(sizes, 2))


def _on_one_mesh(*each: Factors) -> bool:
    """Whether the axes of one mesh carry out all of these factors."""
    try:
        return bool(axis_sizes(*each))
    except ShardingError:
        return False


@dataclass(frozen=True)
class PlannedGroups:
    """The factors of all groups of a model.

    Attributes:
      of_group: the candidate of each group, by its name. `held` says its memory.
      best: all groups together: the memory and the times of a step. Its factors are those of the last group.
      alike: the result if all groups have the same factors, counted in the same way. If nothing fits, it has no
        candidates, and its best is the one that needs least.
      known: known strategies for all groups, by name.
    """

    of_group: dict[str, Candidate]
    best: Candidate
    alike: Planned
    known: dict[str, Candidate]

    @property
    def equal(self) -> bool:
        """Whether all groups have the same factors."""
        return len({candidate.factors for candidate in self.of_group.values()}) == 1

    @property
    def gain(self) -> str:
        """What groups gain over one triple of factors for all, in words."""
        one, limit = self.alike.best, self.alike.limit
        if not self.alike.candidates:
            return f"no single factors for all groups fit into {in_words(limit)}"
        if self.equal:
            return f"groups gain less than {TIE:.0%}, so all of them have the same factors"
        step = self.best.times.step
        seconds, size = one.times.step - step, one.memory.total - self.best.memory.total
        time = f"{abs(seconds) * 1e3:.3g} ms {'longer' if seconds >= 0.0 else 'less'} ({seconds / step:+.2%})"
        memory = f"{in_words(abs(size))} {'more' if size >= 0.0 else 'less'}"
        return f"with {one.factors} for all, a step takes {time} and {memory} memory"

    def plan(self, axes: Axes = ()) -> ShardingPlan:
        """The section of a plan file, for these mesh axes. The group OTHERS holds what no key matches.

        If all groups have the same factors, the plan has no groups.
        """
        if self.equal:
            return ShardingPlan(self.best.factors, "inside", axes=axes)
        return plan_of(self.of_group, OTHERS if OTHERS in self.of_group else None, axes)


def plan_groups(
    job: Job,
    groups: Sequence[ParameterGroup],
    times: CollectiveTimes,
    limit: float,
    overlap: Overlap | None = None,
    objective: str = "exposed",
) -> PlannedGroups:
    """The best factors of each group of a model, beside the best for all.

    Args:
      job: the whole model's. If it has `rest`, the groups together need as much as its plain step.
      groups: as `part_of` makes them, on one mesh and with the same choices.
      limit, overlap, objective: as in `planner.plan`.

    Returns:
      The best plan. It has the same factors for all groups, if these are as good to within `planner.TIE`.

    Raises:
      ShardingError: nothing fits, or a name occurs twice.
      DhelixError: OR-tools is missing.
    """
    common, mesh = _common(job, groups, times, overlap), groups[0].mesh

    def alike(factors: Factors) -> Candidate:
        return _together([evaluate(group.job, factors, times, overlap) for group in groups], common)

    found = [alike(factors) for factors in groups[0].every]
    fits = any(candidate.memory.total <= limit for candidate in found)
    least = min(found, key=lambda candidate: candidate.memory.total)
    planned = choose(job, found, limit, objective) if fits else Planned(job, limit, objective, least, (), tuple(found))
    try:
        of_group = solve(groups, times, limit, common.total, overlap, objective)
    except ShardingError:
        choose(job, found, limit, objective)  # if nothing fits, its error says what would
        raise
    best, one = _together(list(of_group.values()), common), planned.best
    as_fast = one.value(objective) <= (1.0 + TIE) * best.value(objective)
    if fits and as_fast and one.memory.total <= (1.0 + TIE) * best.memory.total:
        best = one
        of_group = {group.name: evaluate(group.job, one.factors, times, overlap) for group in groups}
    named = {name: alike(factors) for name, factors in known(mesh).items()}
    return PlannedGroups(of_group, best, planned, named)


def _common(job: Job, groups: Sequence[ParameterGroup], times: CollectiveTimes, overlap: Overlap | None) -> Memory:
    """The memory that belongs to no group. That of a compiled step is what its plain form needs beside the groups."""
    sizes = job.sizes
    nothing = sizes.only(sizes.name, [0] * len(sizes.modules), [0] * len(sizes.outside))
    plain = Factors(groups[0].mesh)
    found = memories.memory(nothing, plain, job.kept, job.batch, job.bucket, job.split)
    if job.rest is None:
        return found
    of_groups = sum(held(evaluate(group.job, plain, times, overlap)) for group in groups)
    more = evaluate(job, plain, times, overlap).memory.total - of_groups - found.total
    return replace(found, activations=max(found.activations + more, 0.0))


def _together(found: Sequence[Candidate], common: Memory) -> Candidate:
    """Candidates of all groups of a model as one, with the factors of the last."""
    memory, basis = common, {}
    for candidate in found:
        memory += replace(candidate.memory, activations=0.0, logits=0.0)
        for kind, seconds in candidate.times.basis.items():
            basis[kind] = basis.get(kind, 0.0) + seconds
    rows = zip(*(candidate.times.parts for candidate in found), strict=True)
    parts = tuple(Part(row[0].name, sum(p.total for p in row), sum(p.exposed for p in row)) for row in rows)
    update = sum(candidate.times.update for candidate in found)
    sent = tuple(one for candidate in found for one in candidate.times.sent)
    return Candidate(found[-1].factors, memory, StepTimes(parts, found[0].times.compute, update, basis, sent))


def plan_of(solved: Mapping[str, Candidate], others: str | None, axes: Axes = ()) -> ShardingPlan:
    """The plan that carries out what `solve` chose. `dhelix.sharding_plan` takes it.

    Args:
      solved: the candidate of each group. The group's name must match the paths of its parameters, as
        `runtime/sharding/parameter_groups.py` says.
      others: the group of all parameters whose path no other group's name matches; None if there are none.
      axes: as in `ShardingPlan`.

    Raises:
      ShardingError: there is no such group, or groups are on different meshes.
    """
    if others is not None and others not in solved:
        raise ShardingError(f"no group is called {others!r}; choose from {', '.join(solved)}")
    groups = tuple((name, candidate.factors) for name, candidate in solved.items() if name != others)
    rest = Factors(groups[0][1].mesh) if others is None else solved[others].factors
    return ShardingPlan(rest, "inside", axes=axes, groups=groups)


type _Numbers = Mapping[str, Sequence[int]]
type _Choice = tuple[str, int]


def _solve(
    least: _Numbers, limited: Sequence[tuple[_Numbers, int]], apart: Sequence[tuple[_Choice, _Choice]]
) -> dict[str, int]:
    """The number of the choice of each group: the sum of `least` is least, and other sums are limited.

    Args:
      limited: numbers, and what their sum may be.
      apart: pairs of choices that exclude each other.
    """
    cp_model = _solver()
    model = cp_model.CpModel()
    taken = {name: [model.new_bool_var(f"{name} {n}") for n in range(len(row))] for name, row in least.items()}
    for row in taken.values():
        model.add_exactly_one(row)

    def total(numbers: _Numbers) -> Any:
        return sum(number * var for name, row in taken.items() for number, var in zip(numbers[name], row, strict=True))

    for numbers, bound in limited:
        model.add(total(numbers) <= bound)
    for (one, n), (other, k) in apart:
        model.add_bool_or(~taken[one][n], ~taken[other][k])
    model.minimize(total(least))
    engine = cp_model.CpSolver()
    engine.parameters.num_workers = 1
    engine.parameters.random_seed = 0
    engine.parameters.max_deterministic_time = _EFFORT
    found = engine.solve(model)
    if found == cp_model.INFEASIBLE:
        raise ShardingError(
            "no factors of the groups fit into memory together on the axes of one mesh; use fewer groups"
        )
    if found != cp_model.OPTIMAL:
        raise ShardingError("the factors of the groups were not found: please report this with the groups")
    return {name: next(n for n, var in enumerate(row) if engine.value(var)) for name, row in taken.items()}


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise DhelixError("factors of groups need OR-tools: pip install 'dhelix[plan]'") from None
    return cp_model
