"""Shows the progress of long work: by a bar on a terminal, and by plain lines elsewhere."""

from __future__ import annotations

import time

from rich import progress
from rich.console import Console

_LINES = 20  # of steps, where there is no terminal
_SILENCE = 30.0  # seconds after which there is a line all the same


class Progress:
    """A context manager that shows how many of the steps `first` + 1 to `last` are done."""

    def __init__(self, console: Console, first: int, last: int, what: str = "step"):
        self._console = console
        self._first, self._last, self._what = first, last, what
        self._interval = max(1, (last - first) // _LINES)
        self._written = time.monotonic()
        self._bar = None if not console.is_terminal else progress.Progress(
            progress.TextColumn(f"{what} {{task.completed}}/{{task.total}}"),
            progress.BarColumn(bar_width=30),
            progress.TextColumn("{task.description}"),
            progress.TimeRemainingColumn(compact=True),
            console=console,
        )  # fmt: skip
        self._task = self._bar.add_task("compiles", total=last, completed=first) if self._bar else None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, number: int, *words: str, always: bool = False) -> None:
        """Shows that `number` steps are done, followed by `words`. A `number` above `last` becomes the new `last`.

        Args:
          always: whether to write a line that stays, even if only some steps have one. On a terminal, it stands above
            the bar.
        """
        text = "  ".join(words)
        self._last = max(self._last, number)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=number, total=self._last, description=text)
            due = always
        else:
            silent = time.monotonic() - self._written >= _SILENCE
            due = always or silent or number in (self._first + 1, self._last) or number % self._interval == 0
        if due:
            self._written = time.monotonic()
            say(self._console, f"{self._what} {number:>{len(str(self._last))}}/{self._last}  {text}")


def say(console: Console, text: str) -> None:
    """Prints a line of text as it is, without highlighting, wrapping or markup."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)
