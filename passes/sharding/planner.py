"""The planner: the factors whose communication costs least among those that fit into memory (AMSP IV and V-B).

    planned = plan(job, mesh, times, limit=80e9)
    planned.best.factors                    # parameters 1x1, gradients 1x1, optimizer 8x1 of 8x128
    planned.why(planned.candidates[1])      # '0.12 s longer, above all broadcast (+0.11 s), and ...'

All admissible factors are tried (`factors.admissible`): 121 for 128 nodes of 8 GPUs. Brute force is enough, as the
paper says. Candidates that need more memory than the limit are left out (its inequality 2).

The paper minimises T, the sum of all collectives (`objective="total"`). That counts communication that compute hides,
so the default is `"exposed"`: what is added to the compute of a step, with the optimizer's update. Both are reported.
Tables of collectives have errors. So candidates within `TIE` of the least count as equal, and the one with the least
memory is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dhelix.passes.sharding import memory as memories
from dhelix.passes.sharding.collective_times import CollectiveTimes
from dhelix.passes.sharding.factors import Factor, Factors, ShardingError, admissible
from dhelix.passes.sharding.memory import Memory
from dhelix.passes.sharding.overlap import Overlap
from dhelix.passes.sharding.sizes import Batch
from dhelix.passes.sharding.step_times import Job, StepTimes

TIE = 0.02
"""Relative difference below which two times count as equal."""

OBJECTIVES = ("exposed", "total")
"""What the planner minimises: what a step loses to communication, or the sum of all collectives as in the paper."""

GB, _MB = 1e9, 1e6


@dataclass(frozen=True)
class Candidate:
    """Factors with their memory and times."""

    factors: Factors
    memory: Memory
    times: StepTimes

    def value(self, objective: str) -> float:
        """Seconds that the planner minimises."""
        if objective == "total":
            return self.times.total
        return self.times.exposed + self.times.update


@dataclass(frozen=True)
class Planned:
    """The result of the planner.

    Attributes:
      job: what was planned for.
      limit: bytes of memory of a device.
      objective: one of OBJECTIVES.
      best: the chosen candidate.
      candidates: all that fit, the fastest first.
      rejected: all that do not fit, those with the least memory first.
      compiled: seconds of a step by the programs of the closest candidates, if these decided (`planning/finalists.py`).
    """

    job: Job
    limit: float
    objective: str
    best: Candidate
    candidates: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    compiled: Mapping[Factors, float] = field(default_factory=dict)

    @property
    def alternatives(self) -> tuple[Candidate, ...]:
        """All that fit but the chosen one, the fastest first."""
        return tuple(candidate for candidate in self.candidates if candidate != self.best)

    def why(self, candidate: Candidate) -> str:
        """Why a candidate was not chosen, as a text."""
        over = candidate.memory.total - self.limit
        if over > 0.0:
            return f"needs {in_words(over)} more than there are"
        if candidate.factors in self.compiled and self.best.factors in self.compiled:
            slower = self.compiled[candidate.factors] / self.compiled[self.best.factors] - 1.0
            return f"{slower:.1%} longer, compiled as it would run"
        lost = candidate.value(self.objective) - self.best.value(self.objective)
        more = candidate.memory.total - self.best.memory.total
        if abs(lost) <= TIE * self.best.value(self.objective):
            return f"the same time within {TIE:.0%}, and {in_words(more)} more"
        terms = self._terms(candidate)
        name = max(terms, key=lambda term: terms[term])
        return f"{lost:.3g} s longer, above all {name} ({terms[name]:+.3g} s), and {in_words(abs(more))} {_less(more)}"

    def _terms(self, candidate: Candidate) -> Mapping[str, float]:
        """How much longer each part of a candidate is than that of the chosen one, in seconds."""
        total = self.objective == "total"
        pairs = zip(candidate.times.parts, self.best.times.parts, strict=True)
        terms = {a.name: a.total - b.total if total else a.exposed - b.exposed for a, b in pairs}
        return terms if total else {**terms, "update": candidate.times.update - self.best.times.update}


def evaluate(job: Job, factors: Factors, times: CollectiveTimes, overlap: Overlap | None = None) -> Candidate:
    """The memory and the times of a job under given factors. A secondary shard takes memory as well."""
    found = memories.memory(job.sizes, factors, job.kept, job.batch, job.bucket, job.split)
    if job.rest is not None:
        found = replace(found, activations=max(found.activations + job.rest, 0.0))
    if job.secondary is not None:
        shard = job.kept.moved_parameter * job.sizes.parameters / job.secondary.size
        found = replace(found, gathered=found.gathered + shard)
    return Candidate(factors, found, StepTimes.of(job, factors, times, overlap))


def plan(
    job: Job,
    mesh: Factor,
    times: CollectiveTimes,
    limit: float,
    overlap: Overlap | None = None,
    objective: str = "exposed",
    choices: Iterable[Factors] | None = None,
) -> Planned:
    """The best factors over `mesh`.

    Args:
      times: how long collectives take.
      limit: bytes of memory of a device.
      overlap: which collectives are hidden; None: all.
      objective: one of OBJECTIVES.
      choices: the factors to choose from; None: all admissible ones.

    Raises:
      ShardingError: nothing fits. The message says how much is missing, and what would fit.
    """
    return choose(job, [evaluate(job, each, times, overlap) for each in choices or admissible(mesh)], limit, objective)


def choose(job: Job, found: Sequence[Candidate], limit: float, objective: str = "exposed") -> Planned:
    """The best of some candidates. `plan` says what the arguments mean, and what is raised."""
    if objective not in OBJECTIVES:
        raise ShardingError(f"objective {objective!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    fitting = sorted(
        (c for c in found if c.memory.total <= limit),
        key=lambda c: (c.value(objective), c.memory.total, _key(c.factors)),
    )
    left = sorted((c for c in found if c.memory.total > limit), key=lambda c: (c.memory.total, _key(c.factors)))
    if not fitting:
        raise ShardingError(_nothing_fits(job, left[0], limit))
    near = [c for c in fitting if c.value(objective) <= (1.0 + TIE) * fitting[0].value(objective)]
    best = min(near, key=lambda c: (c.memory.total, c.factors.optimizer.size, c.value(objective), _key(c.factors)))
    return Planned(job, limit, objective, best, tuple(fitting), tuple(left))


def baselines(
    job: Job, mesh: Factor, times: CollectiveTimes, overlap: Overlap | None = None, group: Factor | None = None
) -> dict[str, Candidate]:
    """Known strategies under the same overlap."""
    return {name: evaluate(job, found, times, overlap) for name, found in known(mesh, group).items()}


def known(mesh: Factor, group: Factor | None = None) -> dict[str, Factors]:
    """The factors of known strategies: ZeRO-1, ZeRO-3, and MiCS with `group`, by default the GPUs of a node."""
    named = {"ZeRO-1": "zero1", "ZeRO-3": "zero3", "MiCS": "mics"}
    return {name: Factors.named(key, mesh, group if key == "mics" else None) for name, key in named.items()}


def _key(factors: Factors) -> tuple[Factor, ...]:
    return factors.parameters, factors.gradients, factors.optimizer


def _nothing_fits(job: Job, least: Candidate, limit: float) -> str:
    """One line: how much the candidate with the least memory misses, and what would fit."""
    needed = least.memory.total
    lacking = f"{least.factors} needs {in_words(needed)}, {in_words(needed - limit)} too much"
    found = f"nothing fits into {in_words(limit)}: {lacking}"
    if job.rest is not None:
        beside = needed - least.memory.states
        if beside < limit:
            more = least.memory.states / (limit - beside)
            return f"{found}; use {more:.2g} times as many GPUs, fewer sequences in a micro-batch, or rematerialization"
        return f"{found}, and {in_words(beside)} of it are no states; use smaller micro-batches, or rematerialization"
    changes = {"recomputation": {"recompute": True}, "1 sequence in a micro-batch": {"sequences": 1}}
    ways = {words: replace(job.batch, **change) for words, change in changes.items()}
    ways = {words: batch for words, batch in ways.items() if batch != job.batch}

    def memory(batch: Batch) -> Memory:
        return memories.memory(job.sizes, least.factors, job.kept, batch, job.bucket, job.split)

    totals = {words: memory(batch).total for words, batch in ways.items()}
    if fitting := [f"with {words} it needs {in_words(size)}" for words, size in totals.items() if size <= limit]:
        return f"{found}; {', or '.join(fitting)}"
    lightest = memory(replace(job.batch, recompute=True, sequences=1))
    rest = lightest.total - lightest.states
    with_all = f"with {' and '.join(ways)} " if ways else ""
    if lightest.total <= limit:
        return f"{found}; {with_all}it needs {in_words(lightest.total)}"
    if rest < limit:
        return f"{found}; {with_all}it needs {lightest.states / (limit - rest):.2g} times as many GPUs"
    return f"{found}; use shorter sequences, or GPUs with more memory"


def in_words(size: float) -> str:
    """Bytes in words: "13.5 GB", or "8.2 MB" where a tenth of a gigabyte says too little."""
    return f"{size / GB:.1f} GB" if abs(size) >= GB / 10.0 else f"{size / _MB:.3g} MB"


def _less(more: float) -> str:
    return "more" if more > 0.0 else "less"
