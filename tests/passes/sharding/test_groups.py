"""Factors of parameter groups: CP-SAT against brute force."""

from __future__ import annotations

from itertools import product

import pytest

from dhelix.passes.sharding.factors import Factor, ShardingError, admissible
from dhelix.passes.sharding.groups import ParameterGroup, held, plan_of, solve
from dhelix.passes.sharding.planner import TIE, evaluate
from dhelix.passes.sharding.sizes import FROZEN, MIXED, Batch
from dhelix.tests.passes.sharding.models import LLAMA_7B, TIMES, job, llama

GROUPS = [
    ParameterGroup("layers", job(LLAMA_7B, Batch(microbatches=4)), Factor(4, 4)),
    ParameterGroup("experts", job(llama(16, 5120, 13_824), Batch(microbatches=4)), Factor(2, 2)),
    ParameterGroup("base", job(llama(8), Batch(microbatches=4), FROZEN), Factor(4, 4)),
]


@pytest.mark.parametrize("limit", [200e9, 90e9, 60e9, 45e9])
def test_it_finds_what_trying_everything_finds(limit: float) -> None:
    found = solve(GROUPS, TIMES, limit, others=5e9)
    options = [[evaluate(g.job, f, TIMES) for f in admissible(g.mesh)] for g in GROUPS]
    fitting = [
        (sum(c.value("exposed") for c in chosen), sum(map(held, chosen)))
        for chosen in product(*options)
        if sum(map(held, chosen)) + 5e9 <= limit
    ]
    fastest = min(fitting)[0]
    least = min(size for seconds, size in fitting if seconds <= (1 + TIE) * fastest)
    assert sum(c.value("exposed") for c in found.values()) <= (1 + TIE) * fastest * (1 + 1e-6)
    assert sum(map(held, found.values())) == pytest.approx(least, rel=1e-6)
    assert found == solve(GROUPS, TIMES, limit, others=5e9)


def test_experts_choose_within_their_own_mesh() -> None:
    found = solve(GROUPS, TIMES, 60e9)
    assert list(found) == ["layers", "experts", "base"]
    assert found["experts"].factors.mesh == Factor(2, 2)


def test_what_it_chose_is_a_plan() -> None:
    solved = solve([GROUPS[0], GROUPS[2]], TIMES, 60e9)
    plan = plan_of(solved, others="layers")
    assert plan.factors == solved["layers"].factors and dict(plan.groups) == {"base": solved["base"].factors}
    with pytest.raises(ShardingError, match="no group is called 'head'; choose from layers, base"):
        plan_of(solved, others="head")
    with pytest.raises(ShardingError, match="group 'experts' is on a mesh of 2x2, but the other parameters on 4x4"):
        plan_of(solve(GROUPS, TIMES, 60e9), others="layers")


def test_bad_groups() -> None:
    with pytest.raises(ShardingError, match="at least .* GB too much"):
        solve(GROUPS, TIMES, 10e9)
    with pytest.raises(ShardingError, match="'layers' occurs twice"):
        solve([GROUPS[0], GROUPS[0]], TIMES, 80e9)
    assert MIXED.optimizer and not FROZEN.optimizer
