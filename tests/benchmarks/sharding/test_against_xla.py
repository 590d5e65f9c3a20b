"""The planner's memory and bytes of collectives beside those of steps that are compiled for GPUs without having one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dhelix.benchmarks.sharding import against_xla
from dhelix.benchmarks.sharding.against_xla import LIMIT, error, predicted
from dhelix.benchmarks.sharding.cases import Case
from dhelix.benchmarks.sharding.compiled import compile_case

RESULTS = Path(against_xla.__file__).parents[1] / "results" / "sharding_memory.json"


def row(case: Case, compiled: dict[str, Any]) -> dict[str, Any]:
    return {**asdict(case), "compiled": compiled, "predicted": predicted(case)}


def check(case: Case) -> None:
    found = row(case, compile_case(case))
    assert abs(error(found)) <= LIMIT, found
    assert found["predicted"]["collectives"] == found["compiled"]["collectives"]


@pytest.mark.slow
@pytest.mark.deviceless
def test_memory_and_bytes_of_one_micro_batch() -> None:
    check(Case("llama-7b", 8, "zero1", 1))  # scanned layers, so a smaller model would not compile faster


@pytest.mark.slow
@pytest.mark.deviceless
def test_memory_and_bytes_of_two_strands() -> None:
    check(Case("llama-7b", 8, "zero1", 2))


def test_the_results_are_those_of_this_planner() -> None:
    rows = json.loads(RESULTS.read_text())
    assert {one["gpus"] for one in rows} == set(against_xla.GPUS)
    for one in rows:
        case = Case(**{name: one[name] for name in asdict(Case("", 1, "", 1))})
        assert one["predicted"] == predicted(case) and abs(error(one)) <= LIMIT


def test_the_table_marks_what_differs() -> None:
    case = Case("llama-7b", 8, "zero1", 1)
    ours = predicted(case)
    exact = row(case, {**ours, "collectives": dict(ours["collectives"])})
    assert error(exact) == 0.0 and "(" not in against_xla.markdown([exact])
    larger = row(case, {**ours, "temporaries": 2 * ours["temporaries"], "collectives": {"all-reduce": 10**9}})
    text = against_xla.markdown([larger])
    assert error(larger) < -0.3 and "**-" in text and "1.00 (0.00)" in text
    assert "0 of 1 cases are within 5%" in text and "equal in 0 cases" in text
