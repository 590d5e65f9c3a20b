"""Inspects every file of a folder, and reports crashes, hangs and tracebacks.

    python benchmarks/programs/any_hlo.py FOLDER [--seconds 5] [--gib 2] [--json any_hlo.json]

A file ends in one of these ways:

    inspected     tables and JSON were made
    refused       one sentence said what is wrong
    traceback     an error that is no DhelixError
    hang          it took longer than --seconds
    memory        it needed more than --gib
    crash         its process ended

A module without a schedule is refused by `dhelix inspect`. Here it gets the order of its instructions as a schedule, so
that all of the code sees it. One process inspects one file after the other, and is started again after a crash or a
hang.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import queue
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
START = 600.0  # seconds that a process may need until it is ready, also on a slow machine
GOOD = ("inspected", "refused")


def inspect(path: str) -> tuple[str, str]:
    """How the inspection of one file ends, and the words for it."""
    from rich.console import Console

    from dhelix.errors import DhelixError
    from dhelix.launch.inspect import command, picture, tables
    from dhelix.launch.inspect.flags import TABLES
    from dhelix.launch.inspect.inspection import inspect_module
    from dhelix.launch.inspect.reading import dumps
    from dhelix.passes.evaluation.costs import Costs
    from dhelix.profiles.hardware import ALL

    try:
        found = dumps.read_file(dumps.find_module(path))
        if not found.module.is_scheduled:
            found.module.schedule = {c: list(c.instructions) for c in found.module.computations}
        with dumps.blaming(found.file):
            report = inspect_module(found.module, Costs(ALL["H200"]), notes=found.notes)
        command.to_json([report])
        picture.of(report)
        tables.print_tables([report], console=Console(file=io.StringIO(), width=144), show=TABLES)
    except DhelixError as error:
        return ("refused" if str(error) and "\n" not in str(error) else "traceback"), str(error)
    except MemoryError:
        return "memory", ""
    except Exception:
        return "traceback", traceback.format_exc(limit=-6)
    return "inspected", f"{report.instructions} instructions"


def work(gib: float) -> None:
    """Reads paths from stdin, inspects each, and writes a line of JSON for each."""
    import dhelix.launch.inspect.command  # noqa: F401 (imported before memory is limited)

    limit = int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        begun = time.monotonic()
        how, words = inspect(line.rstrip("\n"))
        print(json.dumps((how, words, time.monotonic() - begun)), flush=True)


class Worker:
    """A process that inspects files."""

    def __init__(self, gib: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", str(gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.answer(START)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self, seconds: float) -> Any:
        """The next answer; None if the process ended. Raises queue.Empty if there is none in time."""
        line = self._lines.get(timeout=seconds)
        return json.loads(line) if line else None

    def send(self, path: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()

    def end(self) -> int:
        self.process.kill()
        return self.process.wait()


def results(files: Sequence[Path], seconds: float, gib: float) -> Iterator[dict[str, Any]]:
    """Inspects the files one after the other."""
    worker = None
    for file in files:
        worker = worker or Worker(gib)
        worker.send(file)
        try:
            answer = worker.answer(seconds)
        except queue.Empty:
            answer = ("hang", f"more than {seconds:g} s", seconds)
        if answer is None:
            answer = ("crash", f"exit status {worker.process.wait()}", 0.0)
        if answer[0] not in (*GOOD, "traceback"):
            worker.end()
            worker = None
        yield {"file": str(file), **dict(zip(("how", "words", "seconds"), answer, strict=True))}
    if worker:
        worker.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--json", type=Path, help="write a line for each file here")
    parser.add_argument("--work", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return 0
    if given.folder is None or not given.folder.is_dir():
        parser.error("give a folder of HLO files")
    files = sorted(path for path in given.folder.rglob("*") if path.is_file())
    ends: Counter[str] = Counter()
    lines = []
    for result in results(files, given.seconds, given.gib):
        ends[result["how"]] += 1
        lines.append(json.dumps(result))
        if result["how"] not in GOOD:
            print(f"{result['how']}: {result['file']}\n    {result['words'].strip()}", flush=True)
    if given.json:
        given.json.write_text("\n".join(lines) + "\n")
    print(", ".join(f"{count} {how}" for how, count in ends.most_common()), f"of {len(files)} files")
    return int(bool(ends.keys() - set(GOOD)))


if __name__ == "__main__":
    sys.exit(main())
