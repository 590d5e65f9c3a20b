"""The planner's closest candidates, compared by the programs that would run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax
import pytest

import dhelix
from dhelix.passes.sharding.factors import Factor, Factors, ShardingError
from dhelix.passes.sharding.planner import Planned, plan
from dhelix.profiles.hardware import describe
from dhelix.runtime.planning import finalists
from dhelix.runtime.planning.finalists import MOST, NEAR, by_programs, near
from dhelix.runtime.step.target import Target
from dhelix.tests.passes.sharding.models import TIMES, job
from dhelix.tests.runtime.planning.test_live_plan import arguments, step_of
from dhelix.tests.runtime.sharding.training import mesh

MESH = Factor(8, 4)


def planned() -> Planned:
    return plan(job(), MESH, TIMES, 80e9)


def test_only_candidates_that_formulas_cannot_tell_apart_are_near() -> None:
    found = planned()
    closest = near(found)
    least = min(c.times.step for c in found.candidates)
    assert closest[0] == found.best and 1 < len(closest) <= MOST
    assert all(c.times.step <= (1 + NEAR) * least for c in closest[1:])
    assert near(dataclasses.replace(found, candidates=(found.best,))) == ()


def test_the_fastest_program_wins_and_the_others_say_by_how_much() -> None:
    found = planned()
    first, second = near(found)[:2]
    chosen, lines = by_programs(found, {first.factors: 1.02, second.factors: 1.0})
    assert chosen.best == second and chosen.why(first) == "2.0% longer, compiled as it would run"
    assert len(lines) == 1 and "closest candidates, compiled as they would run" in lines[0] and "1020 ms" in lines[0]
    assert by_programs(found, {}) == (found, ())
    assert by_programs(found, {first.factors: 1.0})[0] is found, "nothing to compare with"


def test_formulas_decide_if_a_candidate_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> float:
        raise ShardingError("too few rows")

    monkeypatch.setattr(finalists, "_seconds", fails)
    target = Target("H200", "nvlink", describe("H200", "nvlink"))
    assert finalists.finalists(len, (), frozenset(), ("dp",), near(planned()), target) == {}


def test_states_are_placed_and_other_arguments_are_not() -> None:
    optimizer = optax.adamw(1e-3)
    state, words = arguments(optimizer, mesh(dp=4, tp=2))
    leaves = frozenset(range(len(jax.tree.leaves(state))))
    plan_of = finalists.StatePlan(Factors.named("zero1", Factor(4)), ("dp",))
    placed = finalists._placed((words, state), frozenset(n + 1 for n in leaves), plan_of, ("dp",))
    assert placed[0] is words
    assert {str(leaf.sharding.spec) for leaf in jax.tree.leaves(placed[1][0])} != {"PartitionSpec()"}
    assert tuple(finalists._holding((words, state), frozenset(n + 1 for n in leaves))) == (1,)


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_plan_says_what_the_programs_of_close_candidates_take() -> None:
    optimizer = optax.adamw(1e-3)
    state, words = arguments(optimizer, dhelix.deviceless.mesh({"dp": 8}))
    found = dhelix.plan_sharding(step_of(optimizer), state, words, profile=None)
    closest = near(dataclasses.replace(found.planned, compiled={}))
    assert len(closest) > 1 and found.planned.best.factors in found.planned.compiled
    assert found.planned.best.factors == min(found.planned.compiled, key=lambda f: found.planned.compiled[f])
    assert any("compiled as they would run" in note for note in found.notes)
