"""Executions of single instructions, from hand-written traces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dhelix.errors import DhelixError
from dhelix.runtime.processes import agreement
from dhelix.runtime.profiling.traces import executions
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.tests.runtime.profiling.recorded_traces import MODULE, Kernel, execution, kernel, profile


def of(*kernels: Kernel) -> list[Execution]:
    """Executions on the only GPU of a trace."""
    (found,) = executions.of_trace(profile({0: kernels}), MODULE).values()
    return found


def times(found: Sequence[Execution]) -> list[tuple[str, float, float]]:
    """Names with starts and ends in microseconds."""
    return [(e.name, pytest.approx(e.start * 1e6), pytest.approx(e.end * 1e6)) for e in found]  # type: ignore


def test_kernels_of_one_instruction_are_one_execution() -> None:
    found = of(kernel(1, 0, 5, "gemm"), kernel(1, 6, 8, "gemm"), kernel(1, 9, 10, "fusion"), kernel(1, 11, 12, "gemm"))
    assert times(found) == [("gemm", 0, 8), ("fusion", 9, 10), ("gemm", 11, 12)]
    assert found[0].seconds == pytest.approx(8e-6)


def test_streams_are_kept_apart_and_sorted_by_start() -> None:
    found = of(kernel(2, 1, 9, "gather"), kernel(1, 0, 2, "a"), kernel(1, 3, 4, "b"), kernel(3, 3.5, 5, "gather"))
    assert times(found) == [("a", 0, 2), ("gather", 1, 9), ("b", 3, 4), ("gather", 3.5, 5)]


def test_iterations_of_a_loop_are_executions_of_their_own() -> None:
    """A stream that runs only the collective of a loop's body has nothing between two of its executions."""
    found = of(*(kernel(2, start, start + 30, "gather") for start in (0, 200, 400)), kernel(1, 0, 430, "gemm"))
    assert [e.name for e in found] == ["gather", "gemm", "gather", "gather"]
    assert sum(e.seconds for e in found if e.name == "gather") == pytest.approx(90e-6)


def test_shared_is_how_long_other_streams_ran_too() -> None:
    found = of(
        kernel(1, 0, 100, "gemm"),
        kernel(2, 40, 60, "gather"),
        kernel(3, 50, 120, "permute"),
        kernel(1, 200, 300, "alone"),
    )
    shared = {e.name: e.shared * 1e6 for e in found}
    expected = {"gemm": 20 + 50, "gather": 20 + 10, "permute": 50 + 10, "alone": 0}
    assert shared == {name: pytest.approx(value) for name, value in expected.items()}
    assert [e.name for e in found if e.undisturbed] == ["alone"]


def test_small_copies_meanwhile_do_not_disturb() -> None:
    gemm, copy = of(kernel(1, 0, 100, "gemm"), kernel(2, 50, 54, "copy"))
    assert gemm.undisturbed and not copy.undisturbed
    assert not of(kernel(1, 0, 100, "gemm"), kernel(2, 50, 56, "copy"))[0].undisturbed


def test_what_is_between_two_kernels_of_an_instruction_disturbs_it() -> None:
    found = of(kernel(1, 0, 10, "gemm"), kernel(2, 11, 19, "gather"), kernel(1, 20, 30, "gemm"))
    assert [(e.name, e.undisturbed) for e in found] == [("gemm", False), ("gather", False)]


def test_other_modules_are_left_out_and_events_without_module_are_not() -> None:
    found = of(
        kernel(1, 0, 1, "dot", "jit_init"),
        kernel(1, 2, 3, "dot"),
        kernel(1, 4, 5, None, None),
        kernel(1, 6, 7, "dot", "jit_step_2"),
    )
    assert times(found) == [("dot", 2, 3), ("", 4, 5)]


def test_gpus_by_number_and_only_those_that_ran_the_module() -> None:
    gpus = {
        n: [kernel(1, 0, 1, None, None), *([kernel(1, 10, 11 + n, "dot")] if n in (2, 10) else [])]
        for n in (10, 0, 2)
    }  # fmt: skip
    found = executions.of_trace(profile(gpus), MODULE)
    assert list(found) == [2, 10]
    assert times(found[10])[-1] == ("dot", 10, 21)


def test_a_trace_without_the_module_is_an_error() -> None:
    with pytest.raises(DhelixError, match="no kernels of jit_step on a GPU; was it recorded while"):
        executions.of_trace(profile({0: [kernel(1, 0, 1, "dot", "jit_other"), kernel(1, 2, 3, None, None)]}), MODULE)
    with pytest.raises(DhelixError, match="no kernels of jit_step"):
        executions.of_trace(profile({}), MODULE)


def test_processes_tell_each_other_what_their_gpus_did(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {0: [Execution("a", 0.1, 0.2, 0.05)], 1: [Execution("a", 1 / 3, 0.4)]}
    monkeypatch.setattr(executions, "record", lambda *_: here)
    assert executions.record_everywhere(lambda: None, MODULE) == list(here.values())
    monkeypatch.setattr(executions.jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "together", lambda purpose, make, errors: make())
    monkeypatch.setattr(agreement, "gathered", lambda purpose, text: [text, "[[]]"])
    assert executions.record_everywhere(lambda: None, MODULE) == [*here.values(), []]


def test_the_innermost_name_counts_and_names_can_be_changed() -> None:
    kernels = [kernel(1, 0, 1, "call.1::dot.3"), kernel(1, 2, 3, "dot.4"), kernel(1, 4, 5, "add")]
    assert [e.name for e in of(*kernels)] == ["dot.3", "dot.4", "add"]

    def rename(name: str) -> str | None:
        return "dot" if name.startswith("dot") else None

    (found,) = executions.of_trace(profile({0: kernels}), MODULE, rename).values()
    assert times(found) == [("dot", 0, 3), ("add", 4, 5)]


def test_gap_is_the_usual_pause_between_kernels() -> None:
    found = [
        execution("a", 0, 10),
        execution("b", 12, 20),
        execution("gather", 15, 30),
        execution("c", 500, 510),  # the host was late
        execution("d", 514, 520),
        execution("e", 590, 600),  # after a collective
    ]
    assert executions.gap_seconds(found) == pytest.approx(4e-6)
    assert executions.gap_seconds([]) == 0.0


# Marks


def is_mark(name: str) -> bool:
    return name.startswith("mark")


def marked(*found: Execution) -> list[tuple[str, float, float]]:
    return sorted(times(list(executions.between_marks(found, is_mark))), key=lambda t: (t[1].expected, t[0]))  # type: ignore


def test_what_has_no_name_takes_that_of_the_mark_before_it() -> None:
    found = marked(
        execution("", 0, 1),
        execution("mark1", 2, 3),
        execution("", 4, 6),
        execution("mark2", 7, 8),
        execution("command_buffer.3", 9, 12),
    )
    assert found == [("", 0, 1), ("mark1", 4, 6), ("mark2", 9, 12)]


def test_pieces_of_one_mark_are_one_execution_and_names_are_kept() -> None:
    """Copy engines of several streams, one of which ends late, with a kernel in between."""
    found = marked(
        execution("mark1", 0, 1),
        execution("", 2, 10),
        execution("", 3, 9),
        execution("gemm", 4, 8),
        execution("", 9, 9.5),
        execution("mark2", 11, 12),
        execution("dot", 13, 14),
        execution("", 13, 15),
    )
    assert found == [("mark1", 2, 10), ("gemm", 4, 8), ("dot", 13, 14), ("mark2", 13, 15)]


def test_without_marks_names_stay_as_they_are() -> None:
    assert marked(execution("gemm", 0, 1), execution("dot", 2, 3)) == [("gemm", 0, 1), ("dot", 2, 3)]
    assert marked(execution("mark1", 0, 1)) == []
    assert marked() == []


def test_marks_in_a_trace_of_copy_engines_and_graphs() -> None:
    found = of(
        kernel(1, 0, 1, "mark1"),
        kernel(7, 2, 9, None, None),
        kernel(8, 2.5, 10, None, None),
        kernel(1, 11, 12, "mark2"),
        kernel(1, 13, 14, "command_buffer"),
        kernel(1, 15, 17, "command_buffer"),
    )
    assert marked(*found) == [("mark1", 2, 10), ("mark2", 13, 17)]
