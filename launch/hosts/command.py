"""`dhelix launch`: starts a program as a job of several processes, or as one process of a scheduler's job.

    dhelix launch --processes 4 train.py --steps 100
    srun dhelix launch train.py --steps 100

The program runs as `python train.py`, so its traceback and exit code are its own. What joins the job lives in the
process, as for `dhelix run` (`runtime/launched`). We stay, and watch.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from dhelix.errors import DhelixError
from dhelix.launch.hosts import place
from dhelix.launch.hosts.children import Child
from dhelix.launch.hosts.output import Output
from dhelix.launch.hosts.place import Place
from dhelix.launch.hosts.templates import fill
from dhelix.launch.hosts.watch import Watch
from dhelix.launch.run import command as undecorated
from dhelix.runtime.launched.task import VARIABLE, Task
from dhelix.runtime.processes.this_machine import free_port
from dhelix.runtime.undecorated.policy import Policy, of_file


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs the job, or prints a template. Returns the exit status of the first process that failed, or 0.

    Raises DhelixError if the command line is wrong, or if no job can be made of it.
    """
    chosen: dict[str, Any] = values.flag_values_dict()
    mesh = _mesh(chosen["mesh"])
    if chosen["template"] and arguments != ["-m"]:
        print(fill.template(chosen, arguments), end="")
        return 0
    if not arguments or arguments == ["-m"]:
        raise DhelixError("give a program: a script, or -m and a module; see `dhelix launch --help`")
    environment = _environment(chosen)
    places = _places(chosen)
    if not places:
        print("dhelix launch: no job is found here (give --processes, or a scheduler's variables), so this is one "
              "process", file=sys.stderr)  # fmt: skip
        _become(arguments, environment)
    if chosen["processes"] is None and (places[0].process == 0 or not places[0].shares_output):
        print(f"dhelix launch: {places[0]}", file=sys.stderr, flush=True)
    with _Folder(chosen["logs"]) as folder:
        outputs = [_output(one, chosen["log"], folder) for one in places]  # may fail; no process runs yet
        children: list[Child] = []
        watch = Watch(children, places[0].processes, chosen["heartbeat"])  # before them, so that no signal is missed
        for one, output in zip(places, outputs, strict=True):
            task = Task(one.coordinator, one.processes, one.process, one.local_device_ids, chosen["heartbeat"],
                        chosen["check"] and one.processes > 1, mesh)  # fmt: skip
            children.append(Child(arguments, task, environment, output))
        status = watch.run()
        folder.keep = watch.names_files
    return status


def _places(chosen: Mapping[str, Any]) -> list[Place]:
    """The processes to start here."""
    total = chosen["processes"]
    given = {place.COORDINATOR: "coordinator", place.PROCESSES: "num_processes", place.PROCESS: "process_id"}
    if total is None:
        words = {name: str(chosen[flag]) for name, flag in given.items() if chosen[flag] is not None}
        found = place.find({**os.environ, **words})
        return [] if found is None else [found]
    for flag in given.values():
        if chosen[flag] is not None:
            raise DhelixError(f"--processes starts a whole job on this machine; leave out --{flag}")
    if "SLURM_PROCID" in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise DhelixError("srun starts the processes, and --processes would start as many in each; give one of the two")
    on_cpu = chosen["cpu_devices"] or os.environ.get("JAX_PLATFORMS") == "cpu"
    gpus = [] if on_cpu else place.local_gpus(os.environ)
    if len(gpus) % total:
        raise DhelixError(
            f"{len(gpus)} GPUs do not divide among {total} processes: give another number, or choose GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    each = len(gpus) // total
    coordinator = f"127.0.0.1:{free_port()}"
    return [Place("this machine", coordinator, total, n, tuple(gpus[n * each : (n + 1) * each])) for n in range(total)]


def _environment(chosen: Mapping[str, Any]) -> dict[str, str]:
    """The variables of each process, without its task."""
    policy = undecorated.checked(Policy(**{} if chosen["options"] is None else of_file(chosen["options"])))
    found = {**os.environ, **undecorated.environment(policy, os.environ)}
    found.setdefault("PYTHONUNBUFFERED", "1")  # JAX may end the process without flushing
    if not chosen["interleave"]:
        found.pop("DHELIX_AUTO")
    if chosen["cpu_devices"]:
        found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(chosen["cpu_devices"])}
    return found


def _become(program: Sequence[str], environment: Mapping[str, str]) -> None:
    """This process becomes the program."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *program], {n: v for n, v in environment.items() if n != VARIABLE})


def _output(one: Place, log: str | None, folder: _Folder) -> Output:
    if log == "all":
        return Output.prefixed(f"[{one.process}] ")
    mixed = one.found_by == "this machine" or one.shares_output
    if one.process == 0 or (log is None and not mixed):
        return Output.shown()
    return Output.to_file(folder.path / f"process-{one.process}.log")


def _mesh(words: Sequence[str]) -> dict[str, int]:
    found = {}
    for word in words:
        name, _, size = word.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in found:
            raise DhelixError(f"--mesh {','.join(words)}: give sizes of axes, for example dp=2,tp=4")
        found[name] = int(size)
    return found


class _Folder:
    """A folder for output. A temporary one is made when it is needed, and goes if no message names it."""

    def __init__(self, given: str | None) -> None:
        self.keep = True
        self._given, self._made = given, ""

    @property
    def path(self) -> Path:
        if self._given is None and not self._made:
            self._made = tempfile.mkdtemp(prefix="dhelix-launch-")
        path = Path(self._given or self._made)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DhelixError(f"--logs {path}: cannot be made ({error.strerror}); give another folder") from None
        return path

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._made and not self.keep:
            shutil.rmtree(self._made, ignore_errors=True)
