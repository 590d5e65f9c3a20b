"""What `dhelix shard` found, as data: JSON for scripts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dhelix.launch.shard.job import Task
from dhelix.launch.shard.placed import Placed
from dhelix.passes.sharding.factors import Factor, Factors, ShardingError
from dhelix.passes.sharding.groups import PlannedGroups, held
from dhelix.passes.sharding.planner import Candidate, Planned
from dhelix.passes.sharding.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class ShardView:
    """The result of one call of `dhelix shard`.

    Attributes:
      task: what was planned.
      planned: the planner's result.
      chosen: the shown candidate: the planner's, or that of `--factors`.
      known: candidates of known strategies, by name.
      placed: the placement, if a topology was given.
      axes: the data-parallel mesh axes that the user named.
      groups: the factors of groups of parameters, if they were asked for. Then `chosen` is all of them together, and
        `planned` and `known` are for equal factors of all groups.
    """

    task: Task
    planned: Planned
    chosen: Candidate
    known: dict[str, Candidate]
    placed: Placed | None = None
    axes: tuple[str, ...] = ()
    groups: PlannedGroups | None = None

    @property
    def plan(self) -> ShardingPlan:
        """The section of a plan file."""
        placed = self.placed or Placed()
        if self.groups is None:
            return ShardingPlan(self.chosen.factors, self.task.job.split, placed.order, self.axes, placed.gpu_order)
        return replace(self.groups.plan(self.axes), placement=placed.order, gpu_order=placed.gpu_order)

    def gain(self, candidate: Candidate) -> float | None:
        """How many times as fast the chosen factors are; None if the candidate does not fit."""
        if candidate.memory.total > self.planned.limit:
            return None
        compiled, ours = self.planned.compiled, self.chosen.factors
        if candidate.factors in compiled and ours in compiled and self.groups is None:
            return compiled[candidate.factors] / compiled[ours]
        return candidate.times.step / self.chosen.times.step

    @property
    def compiled(self) -> float | None:
        """Seconds of a step by the program of the chosen factors; None if it was not compiled."""
        return self.planned.compiled.get(self.chosen.factors) if self.groups is None else None

    def to_json(self, alternatives: int) -> dict[str, Any]:
        """Everything as JSON values. Times are in seconds, memory is in bytes, factors are [GPUs, nodes]."""
        task, times = self.task, self.chosen.times
        mesh, sizes, batch = task.mesh, task.job.sizes, task.job.batch
        return {
            "model": sizes.name,
            "parameters": sizes.parameters,
            "mesh": [mesh.gpus, mesh.nodes],
            **_factors(self.chosen.factors),
            "split": task.job.split,
            **self._groups(),
            **self._placement(),
            "batch": {
                "sequences": batch.sequences,
                "seq": batch.length,
                "microbatches": batch.microbatches,
                "recompute": batch.recompute,
            },
            "objective": self.planned.objective,
            "memory": {
                "limit": _bytes(self.planned.limit),
                "total": _bytes(self.chosen.memory.total),
                **{name: _bytes(size) for name, size in self.chosen.memory.parts().items()},
            },
            "time": {
                "step": _seconds(times.step),
                "step_compiled": None if self.compiled is None else _seconds(self.compiled),
                "compute": _seconds(times.compute),
                "update": _seconds(times.update),
                "total": _seconds(times.total),
                "exposed": _seconds(times.exposed),
                "parts": [
                    {"name": part.name, "total": _seconds(part.total), "exposed": _seconds(part.exposed)}
                    for part in times.parts
                ],
            },
            "times_from": task.source,
            "notes": list(task.notes),
            "guessed": round(times.guessed, 6),
            "scaled": round(times.scaled, 6),
            "gains": {name: self._gain(candidate) for name, candidate in self.known.items()},
            "alternatives": [self._row(candidate) for candidate in self.others[:alternatives]],
            "refused": [self._row(candidate) for candidate in self.planned.rejected[:alternatives]],
        }

    def _groups(self) -> dict[str, Any]:
        if self.groups is None:
            return {}
        one = self.groups.alike.best
        rows = {
            name: {
                **_factors(found.factors),
                "memory": _bytes(held(found)),
                "total": _seconds(found.times.total),
                "exposed": _seconds(found.times.exposed),
                "update": _seconds(found.times.update),
            }
            for name, found in self.groups.of_group.items()
        }
        alike = {
            **_factors(one.factors),
            "fits": bool(self.groups.alike.candidates),
            "memory": _bytes(one.memory.total),
            "step": _seconds(one.times.step),
            "exposed": _seconds(one.times.exposed),
        }
        return {"groups": rows, "one_for_all": alike, "gain_of_groups": self.groups.gain}

    def _placement(self) -> dict[str, Any]:
        placed = self.placed or Placed()
        sent = {one.links: {"listed": _bytes(one.listed), "placed": _bytes(one.placed)} for one in placed.traffic}
        return {
            "placement": list(placed.order) if placed.order else None,
            "gpu_order": list(placed.gpu_order) if placed.gpu_order else None,
            "slow_links": sent,
        }

    @property
    def others(self) -> tuple[Candidate, ...]:
        """All candidates that fit but the shown one, the fastest first."""
        return tuple(each for each in self.planned.candidates if each != self.chosen)

    def why(self, candidate: Candidate) -> str:
        """Why a candidate was not chosen."""
        if candidate == self.planned.best and self.planned.candidates:
            return "the planner's choice" if self.groups is None else "the best for all groups alike"
        return self.planned.why(candidate)

    def _gain(self, candidate: Candidate) -> float | None:
        found = self.gain(candidate)
        return None if found is None else round(found, 6)

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        times = candidate.times
        return {
            **_factors(candidate.factors),
            "memory": _bytes(candidate.memory.total),
            "step": _seconds(times.step),
            "total": _seconds(times.total),
            "exposed": _seconds(times.exposed),
            "why": self.why(candidate),
        }


def factors_of(texts: list[str], mesh: Factor) -> Factors:
    """The factors of `--factors P,G,OS`. Raises ShardingError if they are none, or do not divide each other."""
    pairs = [text.lower().split("x") for text in texts]
    if len(pairs) != 3 or any(len(p) != 2 or not all(n.isdecimal() for n in p) for p in pairs):
        raise ShardingError(f"--factors {','.join(texts)}: give three factors as GPUsxNODES, such as 1x1,1x1,8x1")
    return Factors(mesh, *(Factor(int(gpus), int(nodes)) for gpus, nodes in pairs))


def _factors(factors: Factors) -> dict[str, list[int]]:
    states = zip(("p", "g", "os"), factors.states(), strict=True)
    return {short: [factor.gpus, factor.nodes] for short, (_, factor) in states}


def _seconds(value: float) -> float:
    return float(f"{value:.6g}")


def _bytes(value: float) -> int:
    return round(value)
