"""The measurements of a tuning, in a file, so that an interrupted one goes on where it stopped.

    {"program": "4f1c...", "settings": "9a3e...", "began": true}
    {"program": "4f1c...", "settings": "9a3e...", "times": {"5d0c5f7e0c1b7a52": [[0.001, ...], [0.002, ...], 0.004]}}
    {"program": "4f1c...", "settings": "77b2...", "failed": "no answer for 60 s"}

A line is added before and after each measurement. So whoever watches the process can mark the one that never ended
(`mark_failed`), and it is not tried again. Measurements of other programs in the file do no harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.framework.fingerprint import of_bytes
from dhelix.runtime.tuning.bodies import BodyTimes, StepTimes
from dhelix.runtime.tuning.step_search import StepSettings

_BEGAN, _TIMES, _FAILED = "began", "times", "failed"


class Records:
    """The measurements of one program.

    Attributes:
      failed: why measurements failed, by the digest of their settings.
    """

    def __init__(self, path: Path | None, program: str, known: str | None = None) -> None:
        """
        Args:
          path: the file; None keeps nothing.
          program: digest of the program and of what else decides its times.
          known: the file's text, if another process has read it.
        """
        self._path, self._program = path, program
        self._times: dict[str, StepTimes] = {}
        self.failed: dict[str, str] = {}
        for line in (read(path) if known is None else known).splitlines():
            self._take(line)

    def find(self, settings: StepSettings) -> StepTimes | None:
        """The times that were measured under these settings."""
        return self._times.get(digest(settings))

    def begin(self, settings: StepSettings) -> None:
        self._add(settings, {_BEGAN: True})

    def end(self, settings: StepSettings, times: StepTimes) -> None:
        self._times[digest(settings)] = times
        rows = {name: [one.collectives, one.computations, one.whole] for name, one in times.items()}
        self._add(settings, {_TIMES: rows})

    def _take(self, line: str) -> None:
        try:
            found = json.loads(line)
            if found["program"] != self._program:
                return
            if _TIMES in found:
                times = {name: BodyTimes(tuple(x), tuple(y), float(z)) for name, (x, y, z) in found[_TIMES].items()}
                self._times[found["settings"]] = times
            elif _FAILED in found:
                self.failed[found["settings"]] = str(found[_FAILED])
        except (ValueError, KeyError, TypeError):
            return  # half of a line, from a process that was killed while it wrote

    def _add(self, settings: StepSettings, fields: Mapping[str, Any]) -> None:
        if self._path is not None:
            _append(self._path, {"program": self._program, "settings": digest(settings), **fields})


def mark_failed(path: Path, why: str, known: str = "") -> bool:
    """Marks the measurement that began last, if it never ended. Returns whether there is one.

    Args:
      known: the file's text before the process that failed. A measurement that began then was only interrupted.
    """
    last: dict[str, Any] = {}
    for line in read(path).removeprefix(known).splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        last = found if isinstance(found, dict) else last
    if _BEGAN not in last:
        return False
    _append(path, {"program": last["program"], "settings": last["settings"], _FAILED: why})
    return True


def read(path: Path | None) -> str:
    """The text of the file; "" if there is none. Raises DhelixError if it cannot be read."""
    try:
        return "" if path is None else path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DhelixError(f"{path}: measurements cannot be read ({error.strerror}); give another file") from None


def digest(settings: StepSettings) -> str:
    """Identifies settings of a step."""
    rows = sorted((list(identity), *vars(setting).values()) for identity, setting in settings.items())
    return of_bytes(json.dumps(rows).encode())


def _append(path: Path, row: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise DhelixError(f"{path}: measurements cannot be kept ({error.strerror}); give another file") from None
