"""The planner's memory and bytes of collectives beside those of steps that are compiled for GPUs without having one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from dhelix.benchmarks.sharding import against_xla
from dhelix.benchmarks.sharding.against_xla import LIMIT, error, predicted
from dhelix.benchmarks.sharding.cases import Case
from dhelix.benchmarks.sharding.compiled import compile_case


def row(case: Case, compiled: dict[str, Any]) -> dict[str, Any]:
    return {**asdict(case), "compiled": compiled, "predicted": predicted(case)}


def check(case: Case) -> None:
    found = row(case, compile_case(case))
    assert abs(error(found)) <= LIMIT, found
    assert found["predicted"]["collectives"] == found["compiled"]["collectives"]


@pytest.mark.deviceless
def test_memory_and_bytes_of_zero3() -> None:
    check(Case("llama-7b", 8, "zero3", 1, layers=4))


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(
    "case",
    [
        Case("llama-7b", 8, "zero1", 2, layers=4),
        Case("llama-7b", 8, "zero1", 1, "shard_map", layers=4),
        Case("llama-7b", 8, "zero2", 2, layers=4),
    ],
    ids=lambda case: f"{case.strategy}-{case.sharding}-{case.microbatches}",
)
def test_memory_and_bytes(case: Case) -> None:
    check(case)


def test_the_table_marks_what_differs() -> None:
    case = Case("llama-7b", 8, "zero1", 1)
    ours = predicted(case)
    exact = row(case, {**ours, "collectives": dict(ours["collectives"])})
    assert error(exact) == 0.0 and "(" not in against_xla.markdown([exact])
    larger = row(case, {**ours, "temporaries": 2 * ours["temporaries"], "collectives": {"all-reduce": 10**9}})
    text = against_xla.markdown([larger])
    assert error(larger) < -0.3 and "**-" in text and "1.00 (0.00)" in text
    assert "0 of 1 cases are within 5%" in text and "equal in 0 cases" in text
