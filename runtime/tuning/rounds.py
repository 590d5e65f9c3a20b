"""Runs several searches side by side. They share each measurement, because one step measures all of its overlaps.

    found = run({"a": search_a, "b": search_b}, measure)

    search_a(run)      run(settings) waits until every search that still runs has asked, then one step runs for all
    measure(settings)  settings of each search that has asked -> what the step said of each

So the number of steps is that of the longest search, not the sum over all. Searches run in threads of their own, but
never at the same time: one goes on only after the one before it has asked again, in the order of their names. So the
same measurements always lead to the same result.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any


def run[Asked, Told, Found](
    searches: Mapping[str, Callable[[Callable[[Asked], Told]], Found]],
    measure: Callable[[Mapping[str, Asked]], Mapping[str, Told]],
) -> dict[str, Found]:
    """Runs all searches to their ends, and returns what they found.

    Raises whatever `measure` raises. It is raised in every search that waits, which may catch it and end with a result.
    """
    lanes = {name: _Lane(search) for name, search in searches.items()}
    asked = {name: lane.start() for name, lane in lanes.items()}
    while waiting := {name: one for name, (one, ended) in asked.items() if not ended}:
        try:
            told: Mapping[str, Any] = measure(waiting)
        except Exception as error:
            told = dict.fromkeys(waiting, error)
        asked = {name: lanes[name].go_on(told[name]) for name in waiting}
    for lane in lanes.values():
        if lane.error is not None:
            raise lane.error
    return {name: lane.found for name, lane in lanes.items()}


class _Lane:
    """A search in a thread that runs only between `start` or `go_on` and its next question."""

    def __init__(self, search: Callable[[Callable[[Any], Any]], Any]) -> None:
        self.found: Any = None
        self.error: BaseException | None = None
        self._search = search
        self._questions: queue.Queue[tuple[Any, bool]] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> tuple[Any, bool]:
        """Begins the search. Returns its first question, and whether it ended instead."""
        self._thread.start()
        return self._questions.get()

    def go_on(self, answer: Any) -> tuple[Any, bool]:
        """Gives the answer. Returns the next question, and whether the search ended instead."""
        self._answers.put(answer)
        return self._questions.get()

    def _run(self) -> None:
        try:
            self.found = self._search(self._ask)
        except BaseException as error:
            self.error = error
        self._questions.put((None, True))

    def _ask(self, question: Any) -> Any:
        self._questions.put((question, False))
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer
