"""The planner: the least of all admissible factors, why the others lost, and what to do if nothing fits."""

from __future__ import annotations

import time

import pytest

from dhelix.passes.sharding.factors import Factor, ShardingError, admissible
from dhelix.passes.sharding.planner import OBJECTIVES, TIE, baselines, evaluate, plan
from dhelix.passes.sharding.sizes import Batch
from dhelix.tests.machine import slowness
from dhelix.tests.passes.sharding.models import LLAMA_7B, LLAMA_30B, TIMES, job

MESH = Factor(8, 4)
LIMIT = 80e9


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_admissible_factors_that_fit_are_better(objective: str) -> None:
    planned = plan(job(), MESH, TIMES, LIMIT, objective=objective)
    found = [evaluate(job(), factors, TIMES) for factors in admissible(MESH)]
    fitting = [c for c in found if c.memory.total <= LIMIT]
    assert len(planned.candidates) == len(fitting) and len(planned.rejected) == len(found) - len(fitting)
    least = min(c.value(objective) for c in fitting)
    assert planned.best.value(objective) <= (1 + TIE) * least
    lighter = [c for c in fitting if c.memory.total < planned.best.memory.total]
    assert all(c.value(objective) > (1 + TIE) * least for c in lighter)


def test_less_memory_shards_more() -> None:
    many = job(batch=Batch(microbatches=16))
    planned = [plan(many, MESH, TIMES, limit) for limit in (80e9, 50e9, 36e9, 25e9)]
    sizes = [each.best.memory.states for each in planned]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    steps = [each.best.times.step for each in planned]
    assert steps[0] <= steps[-1]


def test_thirty_billion_parameters_on_1024_gpus_take_less_than_two_seconds() -> None:
    begin = time.perf_counter()
    planned = plan(job(LLAMA_30B, Batch(recompute=True)), Factor(8, 128), TIMES, LIMIT)
    assert time.perf_counter() - begin < 2.0 * slowness()
    assert len(planned.candidates) + len(planned.rejected) == len(list(admissible(Factor(8, 128)))) == 121
    assert planned.best.memory.total <= LIMIT


def test_it_says_why_candidates_lost() -> None:
    planned = plan(job(), MESH, TIMES, LIMIT, objective="total")
    reasons = [planned.why(c) for c in (*planned.alternatives, *planned.rejected)]
    assert any("the same time within 2%" in reason for reason in reasons)
    assert any("s longer, above all forward gather (+" in reason for reason in reasons)
    assert all("GB more than there are" in reason for reason in reasons[-len(planned.rejected) :])
    assert planned.best not in planned.alternatives


def test_baselines_are_evaluated_like_candidates() -> None:
    planned = plan(job(), MESH, TIMES, LIMIT)
    found = baselines(job(), MESH, TIMES)
    assert list(found) == ["ZeRO-1", "ZeRO-3", "MiCS"]
    assert all(c in (*planned.candidates, *planned.rejected) for c in found.values())


def test_nothing_fits_and_what_would() -> None:
    with pytest.raises(ShardingError, match=r"needs 34.1 GB, 16.1 GB too much; with recomputation it needs 17.5 GB"):
        plan(job(), Factor(8), TIMES, 18e9)
    with pytest.raises(
        ShardingError, match="with recomputation it needs 25.6 GB, or with 1 sequence in a micro-batch it needs 34.1 GB"
    ):
        plan(job(batch=Batch(sequences=4)), Factor(8), TIMES, 50e9)
    with pytest.raises(ShardingError, match="it needs .* times as many GPUs"):
        plan(job(LLAMA_30B, Batch(recompute=True)), Factor(8), TIMES, 40e9)
    with pytest.raises(ShardingError, match="with recomputation it needs .* times as many GPUs"):
        plan(job(LLAMA_30B), Factor(8), TIMES, 40e9)
    with pytest.raises(ShardingError, match="with recomputation and 1 sequence in a micro-batch it needs 17.5 GB"):
        plan(job(batch=Batch(sequences=8)), Factor(8), TIMES, 18e9)
    with pytest.raises(ShardingError, match="GPUs with more memory"):
        plan(job(LLAMA_7B, Batch(recompute=True)), Factor(8), TIMES, 1e9)
    with pytest.raises(ShardingError, match="objective 'memory' is unknown"):
        plan(job(), MESH, TIMES, LIMIT, objective="memory")


def test_secondary_shards_take_memory() -> None:
    factors = next(iter(admissible(MESH)))
    more = evaluate(job(secondary=Factor(8)), factors, TIMES).memory.total
    assert more - evaluate(job(), factors, TIMES).memory.total == pytest.approx(2 * LLAMA_7B.parameters / 8)
