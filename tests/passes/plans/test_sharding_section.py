"""The sharding section of plan files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan, PlanError
from dhelix.passes.sharding.factors import Factor, Factors, ShardingError
from dhelix.passes.sharding.sharding_plan import ShardingPlan

SHARDING = ShardingPlan(Factors(Factor(8, 2), Factor(4), Factor(4), Factor(8)), "inside", ("b", "a"))
PLAN = Plan("llama-7b", sharding=SHARDING)


def edited(**changes: Any) -> str:
    data = json.loads(plan_files.dumps(PLAN))
    return json.dumps({**data, "sharding": {**data["sharding"], **changes}})


def test_what_is_written_is_read_again() -> None:
    text = plan_files.dumps(PLAN)
    assert plan_files.loads(text, "x") == PLAN
    assert '"sharding": {"mesh": [8, 2], "parameters": [4, 1], "gradients": [4, 1], "optimizer": [8, 1]' in text


def test_a_plan_without_the_section_is_as_before() -> None:
    text = plan_files.dumps(Plan("llama-7b"))
    assert "sharding" not in text and plan_files.loads(text, "x").sharding is None
    nowhere = replace(PLAN, sharding=replace(SHARDING, placement=None))
    assert "placement" not in plan_files.dumps(nowhere)
    assert plan_files.loads(plan_files.dumps(nowhere), "x") == nowhere


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parameters": [3, 1]}, "sharding: the factor of parameters is 3x1, and does not divide"),
        ({"parameters": [4, 0]}, "sharding.parameters.1: expected `int` >= 1"),
        ({"split": "both"}, "split 'both' is unknown; use one of between, inside"),
        ({"placement": ["a"]}, "1 nodes are placed, of 2 in the mesh"),
        ({"placement": ["a", "a"]}, "'a' occurs twice"),
        ({"offload": 1}, "unknown field `offload`"),
    ],
)
def test_errors_say_where(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=r"plan\.json: sharding") as raised:
        plan_files.loads(edited(**changes), "plan.json")
    assert said in str(raised.value)


def test_a_section_is_checked_when_it_is_made() -> None:
    with pytest.raises(ShardingError, match="1 nodes are placed"):
        replace(SHARDING, placement=("a",))
