"""Times of collectives from hand-written traces; the programs are for groups of CPU devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import pytest

from dhelix.errors import DhelixError
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import CollectiveKey
from dhelix.runtime.profiling import collective_tables, measure_tables
from dhelix.runtime.profiling.collective_tables import TableProgram
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.tests.runtime.profiling.recorded_traces import execution

GATHER = CollectiveKey("all-gather", 65536, 4)
REDUCE = CollectiveKey("all-reduce", 65536, 4)
PAIR, PAIRS = CollectiveKey("all-gather", 65536, 2), CollectiveKey("all-gather", 65536, 2, groups=2)
BROADCAST = CollectiveKey("collective-broadcast", 65536, 2, groups=2)

type Gpus = Mapping[int, Sequence[Execution]]


def program(*keys: CollectiveKey) -> TableProgram:
    (found,) = collective_tables.programs(keys, jax.devices()[:4], H200, budget_seconds=0)
    return found


def times(gpus: Gpus, *keys: CollectiveKey) -> dict[CollectiveKey, Any]:
    """Times in microseconds. Executions are named `run <number of the key> <repeat>`, and their marks `mark ...`."""
    runs = [(key, number, repeat) for number, key in enumerate(keys) for repeat in range(3)]
    where = {f"{kind} {n} {repeat}": (key, repeat) for key, n, repeat in runs for kind in ("run", "start")}
    marks = {f"mark {n} {repeat}": (key, repeat) for key, n, repeat in runs}
    found = measure_tables.times(program(*keys), gpus, where, marks)
    return {key: pytest.approx(timing.seconds * 1e6) for key, timing in found.items()}


def ran(repeat: int, microseconds: float, name: str = "run", number: int = 0) -> list[Execution]:
    """A mark and the execution after it, which has no name if `name` is empty."""
    start = 1000.0 * (3 * number + repeat)
    return [
        execution(f"mark {number} {repeat}", start, start + 5),
        execution(f"{name} {number} {repeat}" if name else "", start + 10, start + 10 + microseconds),
    ]


def test_the_median_of_the_repeats_counts() -> None:
    gpus = {0: [*ran(0, 10), *ran(1, 30), *ran(2, 14)]}
    assert times(gpus, GATHER) == {GATHER: 14}
    (timing,) = measure_tables.times(program(GATHER), gpus, {f"run 0 {n}": (GATHER, n) for n in range(3)}, {}).values()
    assert (timing.samples, timing.source) == (3, "alone")


def test_the_gpu_that_came_last_counts() -> None:
    gpus = {n: ran(0, duration) for n, duration in enumerate((50, 20, 35, 90))}
    assert times(gpus, GATHER) == {GATHER: 20}


def test_the_slowest_of_several_groups_counts() -> None:
    gpus = {n: ran(0, duration) for n, duration in enumerate((50, 20, 35, 90))}
    assert times(gpus, PAIRS) == {PAIRS: 35}


def test_a_broadcast_takes_as_long_as_its_slowest_gpu() -> None:
    gpus = {n: ran(0, duration) for n, duration in enumerate((50, 20, 35, 90))}
    assert times(gpus, BROADCAST) == {BROADCAST: 90}


def test_collectives_of_a_program_are_kept_apart() -> None:
    gpus = {n: [*ran(0, 10 + n), *ran(0, 40 + n, number=1), *ran(1, 20 + n)] for n in range(4)}
    assert times(gpus, GATHER, REDUCE) == {GATHER: 15, REDUCE: 40}


def test_what_copy_engines_do_counts_for_the_mark_before_it() -> None:
    gpus = {0: [*ran(0, 10, name=""), *ran(0, 40, number=1), *ran(1, 30, name="")]}
    assert times(gpus, GATHER, REDUCE) == {GATHER: 20, REDUCE: 40}


def test_copies_on_several_streams_take_from_the_first_start_to_the_last_end() -> None:
    for name in ("", "run 0 0"):
        copies = [execution(name, start, end) for start, end in ((10, 40), (11, 38), (12, 50))]
        assert times({0: [execution("mark 0 0", 0, 5), *copies]}, GATHER) == {GATHER: 40}


def test_what_has_a_name_counts_more_than_copies_beside_it() -> None:
    gpus = {0: [*ran(0, 10), execution("", 25, 90)]}
    assert times(gpus, GATHER) == {GATHER: 10}


def test_names_that_xla_wraps_around_a_collective_lead_to_it() -> None:
    assert times({0: ran(0, 10, name="start")}, GATHER) == {GATHER: 10}


def test_what_belongs_to_no_collective_is_left_out() -> None:
    gpus = {0: [execution("", 0, 3), execution("fusion.3", 4, 900), *ran(0, 10), execution("add", 30, 99)]}
    assert times(gpus, GATHER) == {GATHER: 10}
    assert times({0: [execution("fusion.3", 4, 900)]}, GATHER) == {}


def test_gpus_that_take_no_part_are_left_out() -> None:
    gpus = {n: ran(0, 10 + n) for n in range(4)}
    assert times(gpus, PAIR) == {PAIR: 10}
    assert times({1: gpus[1], 3: ran(0, 1)}, PAIR) == {PAIR: 11}


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes"), DhelixError("changed")])
def test_a_program_that_does_not_run_is_a_failure_of_all_its_collectives(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lower(self: TableProgram) -> Any:
        raise error

    monkeypatch.setattr(TableProgram, "lower", lower)
    why = "out of memory" if "EXHAUSTED" in str(error) else "changed"
    assert measure_tables.run(program(GATHER, REDUCE)) == ({}, {str(GATHER): why, str(REDUCE): why})
