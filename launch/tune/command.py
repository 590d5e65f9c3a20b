"""`dhelix tune`: tunes the collectives of a train step on this machine's GPUs.

    dhelix tune --preset llama-8b --layers 8 --mesh tp=2 --settings connections1 --out tuned.json

    1  for each launch setting      a step under NCCL's defaults; under the fastest one, each implementation
    2  under the fastest of these   buffers, channels and threads of the whole process (`process_search.py`)
    3  under what step 2 found      algorithm, protocol and channels of each collective, then the order of the step for
                                    these, by turns until nothing gains (`runtime/tuning`)
    4  what step 3 found            again, in a process that traces nothing; this decides

Each process has a worker (`worker.py`), so this one does not use the GPUs. docs/guide/tuning.md explains the results.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.defaults import INTERRUPTED
from dhelix.launch.profile import workers
from dhelix.launch.profile.step import gpus_of_mesh
from dhelix.launch.shown import figures
from dhelix.launch.shown.progress import say
from dhelix.launch.train import step_flags
from dhelix.launch.tune import picture, processes, tables
from dhelix.launch.tune.flags import NCCL, STEP_OPTIONS
from dhelix.launch.tune.process_search import VARIABLES, search, single
from dhelix.launch.tune.processes import Place
from dhelix.launch.tune.tables import Row
from dhelix.launch.tune.worker import Request
from dhelix.passes.framework.fingerprint import of_bytes
from dhelix.passes.plans import plan_files
from dhelix.passes.tuning.measurements import LimitReached
from dhelix.profiles.collective_matmul.sites import Form
from dhelix.profiles.profile import FASTEST, SETTINGS
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.tuning.records import read
from dhelix.runtime.tuning.step_search import DEFAULTS

_RECORDS = Path("~/.cache/dhelix/tuning")
_CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
"""Variables with which workers share their compiled programs."""

_PROCESS_SHARE = 0.4
"""Fraction of the minutes after which no further process is tried."""


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs `dhelix tune` and returns its exit status. Raises DhelixError if the command fails."""
    chosen = values.flag_values_dict()
    if chosen["settings"] is None:
        chosen["settings"] = ["connections1", FASTEST[chosen["link"]]]
    _check(chosen, arguments)
    jax.config.update("jax_platforms", "cpu")  # the processes that measure need the GPUs
    console = Console(stderr=chosen["json"], width=None if sys.stdout.isatty() else 144, highlight=False)
    with tempfile.TemporaryDirectory(prefix="dhelix-tune-") as folder:
        tuning = _Tuning(chosen, Path(folder), console)
        try:
            rows = tuning.run()
        except KeyboardInterrupt:
            say(console, f"Interrupted; the same command goes on from {tuning.records}.")
            return INTERRUPTED
        if chosen["out"]:
            tuning.write(tables.fastest(rows), chosen["out"])
    if chosen["json"]:
        print(
            json.dumps(
                [
                    {
                        "setting": r.setting,
                        "implementation": r.implementation or NCCL,
                        "environment": dict(r.environment),
                        "searched": r.searched,
                        **r.result,
                    }
                    for r in rows
                ],
                indent=1,
            )
        )
    else:
        tables.show(rows, console)
    if chosen["picture"]:
        row = tables.drawn(rows)
        name = row.name if row.place == tables.fastest(rows).place else f"{row.name} (not chosen)"
        picture.save(row.result, chosen["picture"], f"{chosen['preset']}, {name}")
    if chosen["out"]:
        form = tables.fastest(rows).implementation
        also = (f" --collective_matmul {form}", f", collective_matmul={form!r}") if form else ("", "")
        say(
            console,
            f"wrote {chosen['out']}: dhelix train --plan {chosen['out']}{also[0]}, or "
            f"strand_interleave(plan=...{also[1]})",
        )
    return 0


class _Tuning:
    """The work of one command."""

    def __init__(self, chosen: Mapping[str, Any], folder: Path, console: Console) -> None:
        self._chosen, self._folder, self._console = chosen, folder, console
        self._gpus = gpus_of_mesh(chosen["mesh"]) * chosen["pp"] or None
        self._options = {n: v for n, v in step_flags.given(chosen).items() if n in STEP_OPTIONS}
        self._preset = step_flags.options(chosen).said()
        self._start, self._number, self._said = time.monotonic(), 0, ""
        self._took = 0.0  # seconds of the last process
        told = json.dumps([self._preset, self._options, chosen["link"]], sort_keys=True)
        name = f"{chosen['preset']}-{of_bytes(told.encode())}.jsonl"
        self.records = Path(chosen["records"]) if chosen["records"] else _RECORDS.expanduser() / name
        read(self.records)  # so that a file that cannot be read is an error at once
        if chosen["force"]:
            self.records.unlink(missing_ok=True)

    def run(self) -> list[Row]:
        """Returns what was found in each process."""
        settings = list(dict.fromkeys(self._chosen["settings"]))
        first, *others = self._implementations()
        rows: list[Row] = [self._row(setting, {}, 0.0, first) for setting in settings]
        best: str = tables.fastest(rows).setting
        for form in others:
            with self._said_if_fails(form):
                rows.append(self._row(best, {}, 0.0, form))
        form = tables.fastest(rows).implementation
        environment: Mapping[str, str] = {}
        if self._chosen["process"]:
            fixed = {name for name in VARIABLES if name in os.environ or name in SETTINGS[best].environment}

            def evaluate(tried: Mapping[str, str]) -> float:
                if known := next((row for row in rows if row.place == (best, form, tried)), None):
                    return known.seconds[DEFAULTS]
                if self._spent() > _PROCESS_SHARE * 60.0 * self._chosen["minutes"]:
                    raise LimitReached("the time for processes is over")
                try:
                    rows.append(self._row(best, tried, 0.0, form))
                except DhelixError as error:
                    if not tried:
                        raise  # the step itself does not run
                    say(self._console, f"{tried}: {error}")
                    return math.inf
                return rows[-1].seconds[DEFAULTS]

            def variables() -> tuple[Mapping[str, str], ...]:
                return single(self._chosen["link"], rows[-1].result["sends"])

            environment = search(evaluate, fixed, variables).environment
        # The last part takes about as long as one of the processes before.
        left = max(self._chosen["minutes"] - (self._spent() + self._took) / 60.0, 0.0)
        tuned = replace(self._row(best, environment, left, form), searched=True)
        return [*rows, tuned, *self._checked(tuned)]

    def _checked(self, tuned: Row) -> list[Row]:
        """What was found, in a process that only measures it; none if nothing was found, or if this fails."""
        if not tuned.result["tuning"]["collectives"]:
            return []
        try:
            row = self._row(tuned.setting, tuned.environment, 0.0, tuned.implementation, tuned.plan)
        except DhelixError as error:
            say(self._console, f"the settings cannot be measured again, so none are written: {error}")
            return []
        kept = {name: tuned.result[name] for name in ("iterations", "bodies")}
        return [replace(row, result={**row.result, **kept})]

    def _implementations(self) -> tuple[str, ...]:
        """The values of `collective_matmul` to measure; "": what the flags say, or NCCL alone."""
        given = self._chosen["implementations"]
        if given is None:
            given = [NCCL] if "collective_matmul" in self._options else [NCCL, "auto"]
        return tuple(dict.fromkeys("" if form == NCCL else form for form in given))

    @contextlib.contextmanager
    def _said_if_fails(self, form: str) -> Iterator[None]:
        """Says that an implementation cannot be measured, and goes on."""
        try:
            yield
        except DhelixError as error:
            say(self._console, f"collective matmul {form}: {error}")

    def write(self, row: Row, path: str) -> None:
        """Copies the plan of a row's worker to `path`."""
        assert row.plan is not None
        plan_files.load(row.plan)
        try:
            shutil.copyfile(row.plan, path)
        except OSError as error:
            raise DhelixError(f"{path}: cannot be written ({error.strerror}): choose another place") from None

    def _row(
        self, setting: str, environment: Mapping[str, str], minutes: float, form: str, check: Path | None = None
    ) -> Row:
        """Runs a worker.

        Args:
          check: a plan, whose settings and order are measured.
        """
        self._number += 1
        out = self._folder / f"plan{self._number}.json"
        name = Row(setting, environment, {}, implementation=form).name
        options = {**self._options, "collective_matmul": form} if form else dict(self._options)
        if check and plan_files.load(check).bodies:
            options["plan"] = str(check)
        request = Request(
            self._preset,
            options,
            str(check) if check else self._chosen["plan"],
            str(out),
            minutes,
            self._chosen["patience_s"],
            self._chosen["order"] and minutes > 0.0,
            str(self.records),
            check=check is not None,
        )
        what = "measures what was found" if check else "tunes each collective" if minutes else "measures a step"
        say(self._console, f"{name}: {what}")
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(self._folder / "cache")
        variables = {**_CACHE, "JAX_COMPILATION_CACHE_DIR": cache, **environment}
        place = Place(setting, self._chosen["link"], variables, self._gpus)
        began = self._spent()
        result = processes.tuned(request, place, self._told)
        self._took = self._spent() - began
        return Row(setting, environment, result, out, form)

    def _told(self, what: str) -> None:
        if what != self._said:  # a worker says again what it does, as a sign of life
            say(self._console, f"  {self._spent():4.0f} s  {what}")
        self._said = what

    def _spent(self) -> float:
        return time.monotonic() - self._start


def _check(chosen: Mapping[str, Any], arguments: list[str]) -> None:
    """Raises DhelixError if flags exclude one another, or if there are no GPUs."""
    if arguments:
        raise DhelixError(f"{arguments[0]!r} is not a flag; see `dhelix tune --help`")
    if not chosen["preset"]:
        raise DhelixError("give the step: --preset NAME; for a step of your own, call dhelix.tune")
    unknown = [setting for setting in chosen["settings"] if setting not in SETTINGS]
    if unknown or not chosen["settings"]:
        raise DhelixError(f"--settings {','.join(unknown)} is unknown; choose from {', '.join(SETTINGS)}")
    StepOptions(**{n: v for n, v in step_flags.given(chosen).items() if n in STEP_OPTIONS})
    if chosen["implementations"] is not None:
        if chosen["collective_matmul"]:
            raise DhelixError("--collective_matmul names one implementation; leave it or --implementations out")
        if not chosen["implementations"]:
            raise DhelixError("--implementations is empty; give nccl, auto or forms such as ring")
        for form in set(chosen["implementations"]) - {NCCL, "auto", "hybrid"}:
            Form.parse(form)
    if chosen["plan"]:
        plan_files.load(chosen["plan"])
    if chosen["out"] and not Path(chosen["out"]).absolute().parent.is_dir():
        raise DhelixError(f"{chosen['out']}: there is no such folder; choose another place for the plan")
    if chosen["out"] and Path(chosen["out"]).is_dir():
        raise DhelixError(f"{chosen['out']} is a folder; name a file for the plan")
    if chosen["picture"]:
        figures.chart_metadata(chosen["picture"])
    needed, (_, count) = gpus_of_mesh(chosen["mesh"]) * chosen["pp"], workers.gpus_here()
    if count < 2:
        raise DhelixError(f"tuning measures collectives on GPUs, and this machine has {count or 'none'}; run it there")
    if needed > count:
        raise DhelixError(f"the step needs {needed} GPUs, but there are {count}; give a smaller --mesh")
