"""Lines of progress: some steps, those that matter, and at least one each half minute."""

import io

import pytest
from rich.console import Console

from dhelix.launch.shown import progress


def shown(terminal: bool) -> str:
    file = io.StringIO()
    with progress.Progress(Console(file=file, force_terminal=terminal, width=100), 0, 1000) as bar:
        for number in range(1, 81):
            bar.update(number, f"loss {number}", always=number == 7)
    return file.getvalue()


def test_a_slow_run_has_a_line_each_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(False).splitlines() == [f"step {n:>4}/1000  loss {n}" for n in (1, 7, 50)]
    times = iter(range(0, 10_000, 2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    assert len(shown(False).splitlines()) > 5


def test_lines_that_matter_stay_above_the_bar_of_a_terminal() -> None:
    assert "step    7/1000  loss 7\n" in shown(True)
