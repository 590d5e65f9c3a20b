"""Factors of parameter groups: CP-SAT against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from dhelix.passes.sharding.factors import Factor, Factors, ShardingError, admissible
from dhelix.passes.sharding.groups import OTHERS, ParameterGroup, held, part_of, plan_groups, plan_of, solve
from dhelix.passes.sharding.planner import TIE, evaluate
from dhelix.passes.sharding.sizes import FROZEN, MIXED, SINGLE, Batch
from dhelix.passes.sharding.step_times import Job
from dhelix.tests.passes.sharding.models import LLAMA_7B, TIMES, job, llama, with_rows

MESH = Factor(4, 4)
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


def parts_of_model(microbatches: int = 4, mesh: Factor = MESH) -> tuple[Job, list[ParameterGroup]]:
    """LLaMA-7B as embedding, head and layers."""
    whole, (table, head) = job(batch=Batch(microbatches=microbatches), kept=SINGLE, split="inside"), LLAMA_7B.outside
    sizes = (
        LLAMA_7B.only("embedding", [0, 0], [table.parameters, 0]),
        LLAMA_7B.only("head", [0, 0], [0, head.parameters]),
        LLAMA_7B.only(OTHERS, [module.parameters for module in LLAMA_7B.modules], [0, 0]),
    )
    return whole, [part_of(whole, one, mesh) for one in sizes]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero2", "zero3", "zero++"])
def test_groups_with_equal_factors_are_the_whole_model(strategy: str, microbatches: int) -> None:
    whole, groups = parts_of_model(microbatches)
    factors = Factors.named(strategy, MESH)
    one = evaluate(whole, factors, TIMES)
    alike = plan_groups(whole, [replace(group, choices=(factors,)) for group in groups], TIMES, 1e15).best
    assert alike.memory.states == pytest.approx(one.memory.states)
    more = alike.memory.total / one.memory.total - 1.0  # a single strand is counted at all groups at once
    assert -1e-9 <= more <= (0.05 if microbatches == 1 else 1e-9)
    assert alike.times.compute == one.times.compute and alike.times.update == pytest.approx(one.times.update)
    assert alike.times.exposed == pytest.approx(one.times.exposed, rel=0.1)


def test_groups_are_no_worse_than_one_choice_for_all() -> None:
    whole, groups = parts_of_model()
    for limit in (200e9, 60e9, 40e9):
        found = plan_groups(whole, groups, TIMES, limit)
        assert found.best.memory.total <= limit
        assert found.best.value("exposed") <= (1 + TIE) * found.alike.best.value("exposed") * (1 + 1e-6)
        assert found.equal == (not found.plan().groups)
    assert "gain less than 2%" in plan_groups(whole, groups, TIMES, 200e9).gain
    with pytest.raises(ShardingError, match="nothing fits into 10.0 GB: .* needs"):
        plan_groups(whole, groups, TIMES, 10e9)


def test_a_plan_of_groups_has_axes_for_all_of_them() -> None:
    """On 6 GPUs, parts of 2 and of 3 do not fit each other. The limits lead to different factors."""
    whole, groups = parts_of_model(mesh=Factor(6))
    for limit in (58e9, 64e9, 75e9):
        assert plan_groups(whole, groups, TIMES, limit).plan().factors.mesh == Factor(6)


def test_frozen_shards_are_gathered_once_in_a_step() -> None:
    whole, (embedding, *_) = parts_of_model()
    frozen = part_of(whole, embedding.job.sizes, MESH, replace(SINGLE, gradient=0.0, optimizer=0.0, moved_gradient=0.0))
    found = {name: evaluate(frozen.job, Factors.named(name, MESH), TIMES) for name in ("dp", "zero1", "zero3")}
    assert not found["dp"].times.total and 0 < found["zero1"].times.total < found["zero3"].times.total
    assert found["zero3"].memory.states < found["dp"].memory.states


def test_an_embedding_stays_split_where_its_rows_are_few() -> None:
    for sizes, split in ((LLAMA_7B, 1), (with_rows(LLAMA_7B), 2)):
        whole = job(sizes, Batch(length=512), SINGLE, split="inside")
        (table, head), layers = sizes.outside, [module.parameters for module in sizes.modules]
        groups = [
            part_of(whole, sizes.only("embedding", [0, 0], [table.parameters, 0]), Factor(2)),
            part_of(whole, sizes.only(OTHERS, layers, [0, head.parameters]), Factor(2)),
        ]
        chosen = solve(groups, TIMES, 200e9)
        assert [chosen[name].factors.parameters.size for name in ("embedding", OTHERS)] == [split, 1]
