"""`dhelix profile`: measures how long the operators and collectives of a train step take, alone and in pairs.

    dhelix profile --preset llama-8b --layers 4 --mesh tp=4 --settings default,connections1 --heat_map pairs.png

The times are stored in a profile, a JSON file. Each launch setting gets its own process
(`dhelix.launch.profile.processes`). The process measures those times of the step that are missing in the file, and
writes every batch of results into the file. So an interrupted run loses nothing, and the same command continues it. At
the end, tables show everything that is known about the step. Without a GPU, the command measures nothing and says what
it would measure. In a job of several hosts, the scheduler starts the command in every process, and all measure
together (`in_job.py`). docs/guide/profile.md explains the numbers.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from absl import flags
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.defaults import DEFAULT_GPU, INTERRUPTED
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.profile import in_job, workers
from dhelix.launch.profile import output as profile_output
from dhelix.launch.profile import processes as profile_processes
from dhelix.launch.profile import step as profile_step
from dhelix.launch.profile.job import Job
from dhelix.launch.profile.recorded import Recorded, as_recorded
from dhelix.launch.profile.step import CompiledStep
from dhelix.launch.profile.worker import Request
from dhelix.launch.shown.progress import Progress, say
from dhelix.launch.train import step_flags
from dhelix.launch.train.trainer import Options
from dhelix.passes.hlo import HloModule
from dhelix.profiles import hardware
from dhelix.profiles.files import storage
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import SETTINGS, Profile, Provenance
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.profiling import collective_tables, operator_bases
from dhelix.runtime.profiling.session import Step, Wanted

_DEFAULT_GPUS = 4  # number of GPUs to assume if the machine has none and no step is given


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs `dhelix profile` and returns its exit status. Raises DhelixError if the command fails."""
    chosen = values.flag_values_dict()
    _check(chosen, arguments)
    deviceless.prepare_environment()
    jax.config.update("jax_platforms", "cpu")  # the processes that measure need the GPUs
    console = Console(stderr=chosen["json"], width=None if sys.stdout.isatty() else 144, highlight=False)
    if chosen["compare"] and not _has_step(chosen, arguments) and not chosen["collectives"]:
        path = _path(chosen, chosen["hardware"] or DEFAULT_GPU)
        profile_output.compare_files(path, chosen["compare"], console, chosen["json"])
        return 0
    if chosen["recorded"]:
        job, measure = _from_record(chosen, arguments, console)
    elif chosen["explain"] or not workers.gpus_here()[1]:
        job, measure = _plan(chosen, arguments, console)
    else:
        job, measure = _on_gpus(chosen, arguments, console)
    try:
        measure()
    except KeyboardInterrupt:
        say(console, f"Interrupted; {_GO_ON.format(path=job.path)}")
        return INTERRUPTED
    here = job.here or Provenance("", 0, jax=jax.__version__)
    if not console.quiet:
        profile_output.show(job, chosen, here, console)
    if job.errors:
        raise job.errors[0]
    return 0


_GO_ON = "{path} holds what was measured, and the same command continues from there."

# ---- the three modes: each returns the job, and a function that carries the job out


def _plan(chosen: dict[str, Any], arguments: list[str], console: Console) -> tuple[Job, Callable[[], None]]:
    """The mode without GPUs, or with --explain: the command only says what it would measure."""
    step = _step(chosen, arguments, chosen["hardware"], console)
    gpu = chosen["hardware"] or (step.hardware if step else DEFAULT_GPU)
    job = _job(chosen, gpu, step.gpus if step else _DEFAULT_GPUS, step)

    def explain() -> None:
        why = "Because of --explain," if chosen["explain"] else "Without a GPU"
        say(console, f"{why} nothing is measured. On {job.gpus} x {gpu} this command would measure:")
        for setting in job.settings:
            parts = [_words(job.missing(setting))] if step else []
            if chosen["bases"]:
                parts.append(f"the operators of {', '.join(chosen['bases'])} and their pairs")
            if chosen["collectives"]:
                parts.append(f"{len(_table_keys(job, setting))} collectives for the tables")
            say(console, f"  under {setting}: {'; '.join(parts)}")
        say(console, "The tables below show known times, and estimates of unknown ones.")

    return job, explain


def _from_record(chosen: dict[str, Any], arguments: list[str], console: Console) -> tuple[Job, Callable[[], None]]:
    """The mode with --recorded: measurements come from another profile."""
    record = storage.load(chosen["recorded"])
    step = _step(chosen, arguments, record.hardware, console)
    assert step is not None  # _check requires one
    chosen["link"] = record.link
    job = _job(chosen, record.hardware, step.gpus, step)

    def measure() -> None:
        profile = job.in_file().merged(Profile(record.hardware, record.link, record.measured_on))
        for setting in job.settings:
            with _Bar(console, setting) as bar:
                session = job.session(setting, profile, Recorded(record.section(setting)))
                profile = session.run(Step(step.module), bar.show, save)

    def save(grown: Profile) -> None:
        storage.save(as_recorded(grown, record), job.path)

    return job, measure


def _on_gpus(chosen: dict[str, Any], arguments: list[str], console: Console) -> tuple[Job, Callable[[], None]]:
    """The mode on GPUs: the launch settings are measured one after the other, each in a process of its own.

    In a job, each process of the job has such a process for each setting.
    """
    kind, count = workers.gpus_here()
    place = in_job.find()
    if place:
        console.quiet = place.process != 0  # the first process speaks for all
        count = in_job.gpus(place)
    gpu = hardware.gpu_name(kind) if kind else chosen["hardware"]
    if gpu is None:
        raise DhelixError("nvidia-smi does not name the GPUs; name them with --hardware")
    step = _of_dump(arguments[0], gpu, console) if arguments else None
    needed = step.gpus if step else profile_step.gpus_of_mesh(chosen["mesh"]) * chosen["pp"] or count
    if needed > count and step is None:
        raise DhelixError(f"the step needs {needed} GPUs, but there are {count}; give a smaller --mesh, or a dump")
    if needed > count:
        say(console, 
            f"The step is for {needed} GPUs, but there are {count}: only its operators and the collectives that fit on "
            f"{count} GPUs are measured.")  # fmt: skip
        needed = count
    if place:
        in_job.check(needed, count, chosen["link"])
    if chosen["link"] == "two-nodes" and (needed < 2 or needed % 2):
        raise DhelixError(f"{needed} GPUs do not split into two nodes: use an even number of GPUs, or another --link")
    job = _job(chosen, gpu, needed, None)
    profile_output.warn(storage.differences(job.in_file(), Provenance(kind, count, jax=jax.__version__)), console)
    name = step.name if step else f"{chosen['preset']} on {needed} x {gpu}"
    deadline = time.monotonic() + (chosen["budget_s"] or float("inf"))

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="dhelix-profile-") as temporary:
            for number, (setting, request) in enumerate(_requests(job, chosen, arguments), 1):
                keep = Path(chosen["keep"] or temporary, setting)
                try:
                    finished = listen(number, setting, replace(request, keep=str(_folder(keep))))
                except DhelixError as error:  # continue, because other settings may work
                    if place and time.monotonic() > deadline:
                        return  # the other processes have stopped
                    job.errors.append(error)
                    continue
                finally:
                    job.here = (job.in_file().measured_on or [None])[-1]
                    if (compiled := keep / "step.hlo.pb").is_file() and not request.collectives:
                        job.steps[setting] = CompiledStep(name, HloModule.from_file(compiled), needed, gpu)
                if not finished:
                    say(console, f"Stopped after {chosen['budget_s']:g} s (--budget_s); {_GO_ON.format(path=job.path)}")
                    return

    def listen(number: int, setting: str, request: Request) -> bool:
        node = in_job.of_worker(place, number) if place else None
        with _Bar(console, setting, deadline) as bar:
            gpus = None if request.collectives or place else needed
            return profile_processes.measure(request, bar.go_on, gpus, node, on_nodes)

    def on_nodes(gpus: int) -> None:
        job.gpus_per_node = gpus

    return job, measure


def _requests(job: Job, chosen: dict[str, Any], arguments: list[str]) -> Iterator[tuple[str, Request]]:
    """The launch settings and the requests for the processes that measure, in order."""
    for setting in job.settings:
        request = Request(setting, str(job.path), job.link, pairs=job.pairs, again=job.again)
        bases = tuple(chosen["bases"])
        if chosen["preset"]:
            yield setting, replace(request, bases=bases, preset=_options(chosen).said())
        elif arguments:
            yield setting, replace(request, bases=bases, module=str(dumps.find_module(arguments[0])))
        if chosen["collectives"]:
            yield setting, replace(request, collectives=True)


class _Bar:
    """Shows the progress of one launch setting, and knows the deadline of --budget_s."""

    def __init__(self, console: Console, setting: str, deadline: float = float("inf")) -> None:
        self._console, self._setting, self._deadline = console, setting, deadline
        self._progress: Progress | None = None
        self._total = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.__exit__()

    def go_on(self, done: int, total: int, what: str) -> bool:
        """Shows the progress. Returns False once the deadline has passed."""
        self.show(done, total, what)
        return time.monotonic() < self._deadline

    def show(self, done: int, total: int, what: str) -> None:
        if total != self._total:  # the number of pairs is known only after the operators are measured
            self.__exit__()
            self._total = total
            self._progress = Progress(self._console, done, total, self._setting).__enter__() if total > done else None
        if self._progress is None:
            say(self._console, f"{self._setting}: {what}")
        else:
            self._progress.update(done, what)


# ---- flags, and the step


def _check(chosen: dict[str, Any], arguments: list[str]) -> None:
    """Raises DhelixError if flags exclude one another, or if a flag is missing that another flag needs."""
    has_step = _has_step(chosen, arguments)
    if len(arguments) > 1 or (arguments and chosen["preset"]):
        raise DhelixError("give only one step: a dump, or --preset")
    if not has_step and not chosen["collectives"] and not chosen["compare"]:
        raise DhelixError("give a step (--preset NAME, or a dump), or --collectives to measure tables of collectives")
    unknown = [setting for setting in chosen["settings"] if setting not in SETTINGS]
    if unknown or not chosen["settings"]:
        raise DhelixError(f"--settings {','.join(unknown)} is unknown; choose from {', '.join(SETTINGS)}")
    if unknown := [name for name in chosen["bases"] if name not in operator_bases.SIZES]:
        raise DhelixError(f"--bases {','.join(unknown)} is unknown; choose from {', '.join(operator_bases.SIZES)}")
    if chosen["link"] == "two-nodes" and chosen["bases"]:
        raise DhelixError("--bases are measured within a node: use another --link, or leave out --bases")
    if chosen["recorded"] and not chosen["out"]:
        raise DhelixError(
            "--recorded needs --out, because times of another machine must not become this machine's profile"
        )
    if chosen["recorded"] and (chosen["collectives"] or not has_step):
        raise DhelixError("--recorded needs a step; give one, and leave out --collectives")
    for name in ("heat_map", "pgle", "bases"):
        if chosen[name] and not has_step:
            raise DhelixError(f"--{name} needs a step: give --preset NAME, or a dump")


def _has_step(chosen: dict[str, Any], arguments: list[str]) -> bool:
    return bool(arguments or chosen["preset"])


def _path(chosen: dict[str, Any], gpu: str) -> Path:
    return Path(chosen["out"]) if chosen["out"] else storage.users_file(gpu, chosen["link"])


def _job(chosen: dict[str, Any], gpu: str, gpus: int, step: CompiledStep | None) -> Job:
    path = _path(chosen, gpu)
    settings = tuple(dict.fromkeys(chosen["settings"]))
    steps = dict.fromkeys(settings, step) if step else {}
    return Job(gpu, chosen["link"], gpus, settings, path, chosen["pairs"], chosen["force"], steps)


def _options(chosen: dict[str, Any]) -> Options:
    return step_flags.options(chosen, plain=not chosen["interleave"])


def _step(chosen: dict[str, Any], arguments: list[str], gpu: str | None, console: Console) -> CompiledStep | None:
    """The step of the dump or the preset, compiled without GPUs; None if the command has neither."""
    if arguments:
        return _of_dump(arguments[0], gpu, console)
    if not chosen["preset"]:
        return None
    target = (chosen["hardware"] or DEFAULT_GPU).lower()  # other GPUs get the program of TARGET
    return profile_step.of_preset(_options(chosen), target if target in deviceless.targets() else profile_step.TARGET)


def _of_dump(path: str, gpu: str | None, console: Console) -> CompiledStep:
    """The step of a dump. Also prints the notes on that step."""
    step = profile_step.of_dump(path, gpu)
    for note in step.notes:
        say(console, f"{step.name}: {note}.")
    return step


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DhelixError(f"cannot make the folder {path} ({error.strerror}); give another with --keep") from None
    return path


def _table_keys(job: Job, setting: str) -> list[CollectiveKey]:
    """The collectives of the tables that have no time in the profile's file."""
    devices = [SimpleNamespace(process_index=0, id=number) for number in range(job.gpus)]
    implementation = SETTINGS[setting].implementation
    keys = collective_tables.tables(devices, job.hardware.gpus_per_node, implementation=implementation)
    known = {} if job.again else job.in_file().section(setting).collectives
    return [key for key in keys if key not in known]


def _words(wanted: Wanted) -> str:
    collectives = sum(item.first.is_collective for item in wanted.alone)
    words = (
        f"{len(wanted.alone) - collectives} operators and {collectives} collectives alone, {len(wanted.pairs)} pairs"
    )
    return f"{words}; {len(wanted.refused)} cannot run alone" if wanted.refused else words
