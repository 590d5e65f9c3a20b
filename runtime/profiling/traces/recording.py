"""All GPUs of one recording: the files that the processes of a job wrote into one folder, and the programs in them.

    found = recording.load("trace")      # a folder of jax.profiler.trace, or one file of it
    found.gpus[3].kernels                # of the fourth GPU, counted over all hosts

The profiler writes `plugins/profile/<time>/<host>.xplane.pb`, one file for each host, and the same events as
`<host>.trace.json.gz`. The JSON is read only where there is no `.xplane.pb`. Hosts are sorted by name, and their GPUs
are numbered in this order. A job whose processes have another order than its hosts' names has other numbers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify
from dhelix.runtime.profiling.traces import json_trace, trace, traced_modules
from dhelix.runtime.profiling.traces.trace import Kernel, Profile

PROTO, JSON = ".xplane.pb", (".trace.json.gz", ".trace.json")
_FIRST_FIELD = re.compile(rb"\x0a[\x80-\xff]*[\x00-\x7f](\x08[\x80-\xff]*[\x00-\x7f])?\x12[\x80-\xff]*[\x00-\x7f]/")
"""An XSpace begins with a plane, which has an id (1) and a name (2), such as /device:GPU:0."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of a recording.

    Attributes:
      number: counts from 0 over all hosts.
      host: name of its host's file.
      name: its name in this file, such as `/device:GPU:0`.
      kernels: the kernels of the program and those that name no program, with times in milliseconds.
      launched: when the host's calls ended, by `Kernel.launch`; empty if the trace does not hold the host's calls.
      facts: what the profiler says of the GPU, such as `memory_size`.
    """

    number: int
    host: str
    name: str
    kernels: tuple[Kernel, ...]
    launched: dict[str, float]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Recording:
    """What the hosts of a job recorded at one time.

    Attributes:
      source: the folder or file.
      program: name of the HLO module whose kernels take the most time. Only its kernels are in `gpus`.
      module: this module as it ran; None if the trace does not hold it.
      collectives: names of its instructions that communicate.
      gpus: those that ran the program, on all hosts.
      notes: sentences on what is missing or assumed.
    """

    source: str
    program: str
    module: HloModule | None
    collectives: frozenset[str]
    gpus: tuple[Gpu, ...]
    notes: tuple[str, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(gpu.host for gpu in self.gpus))


def is_trace(path: str | Path) -> bool:
    """Whether `path` is a profiler trace, or a folder that contains one. A file's content decides, not its name.

    A folder that also contains dumps of `--xla_dump_to` counts as a dump.
    """
    path = Path(path)
    if path.is_dir():
        return bool(_files_under(path)) and not any(path.rglob("*after_optimizations*"))
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(65536)
    return bool(_FIRST_FIELD.match(head)) or json_trace.looks_like(head)


def load(path: str | Path, program: str | None = None) -> Recording:
    """Reads a trace, or all hosts' traces of the newest recording in a folder.

    Args:
      program: name of the HLO module to look at; default: the one whose kernels take the most time.

    Raises:
      DhelixError: there is no trace, a file cannot be read, no GPU was recorded, or no GPU ran the program.
    """
    files = _newest(Path(path))
    profiles = {file: _profile(file) for file in files}
    read = {file: {name: trace.kernels(p, name) for name in trace.devices(p)} for file, p in profiles.items()}
    if not any(read.values()):
        raise DhelixError(f"{path} holds no GPU; record the trace on GPUs, with jax.profiler.trace around some steps")
    every = (kernel for of_file in read.values() for kernels in of_file.values() for kernel in kernels)
    program, others = _choose(every, program, str(path))
    held = [m for file in files if file.name.endswith(PROTO) for m in _modules(file) if m.name == program]
    modules = [module for module in held if _is_valid(module)]
    module = modules[0] if modules else None
    collectives = trace.collective_instructions(module) if module is not None else frozenset[str]()
    gpus, notes = [], list(others)
    if held and module is None:
        notes.append(f"the program {program} in the trace is damaged, so names tell which instructions communicate")
    elif module is None:
        notes.append(
            f"the trace does not hold the program {program}: names of instructions tell which communicate, and sizes, "
            "groups, steps, operations and memory are unknown"
        )
    elif len({tuple(i.name for c in m.computations for i in c.instructions) for m in modules}) > 1:
        notes.append(f"the trace holds several programs named {program}: the first one is taken")
    for file in files:
        profile = profiles[file]
        launched = _launched(profile)
        for name, every_kernel in read[file].items():
            kernels = _inside([kernel for kernel in every_kernel if kernel.module in ("", program)])
            if module is not None:
                kernels = tuple(
                    replace(k, is_communication=k.instruction in collectives) if k.instruction else k for k in kernels
                )
            if kernels:
                gpus.append(Gpu(len(gpus), _host(file), name, kernels, launched, _facts(profile, name)))
        if getattr(profile, "events", 0) >= json_trace.MOST_EVENTS:
            notes.append(f"{file.name} holds {profile.events:,} events, as many as fit: give the {PROTO} file")
    return Recording(str(path), program, module, collectives, tuple(gpus), tuple(notes))


def _inside(kernels: list[Kernel]) -> tuple[Kernel, ...]:
    """Leaves out what names no program and runs before or after the program, such as copies of its inputs."""
    named = [kernel for kernel in kernels if kernel.module]
    if not named:
        return ()
    begin, end = min(kernel.start for kernel in named), max(kernel.end for kernel in named)
    return tuple(kernel for kernel in kernels if kernel.start >= begin and kernel.end <= end)


def _host(file: Path) -> str:
    """`node-3.cluster` for `node-3.cluster.xplane.pb`."""
    suffix = next((suffix for suffix in (PROTO, *JSON) if file.name.endswith(suffix)), "")
    return file.name.removesuffix(suffix)


def _facts(profile: Profile, name: str) -> dict[str, Any]:
    plane = next(plane for plane in profile.planes if plane.name == name)
    return dict(getattr(plane, "stats", ()))


def _files_under(folder: Path) -> list[Path]:
    """The traces under a folder: `.xplane.pb` files, or JSON files if there are none."""
    files = sorted(file for file in folder.rglob("*") if file.name.endswith((PROTO, *JSON)))
    return [file for file in files if file.name.endswith(PROTO)] or files


def _newest(path: Path) -> list[Path]:
    """The files that belong together, sorted by name: those in the folder of the newest one."""
    if path.is_file():
        return [path]
    files = _files_under(path) if path.is_dir() else []
    if not files:
        trace.find(path)  # says what is missing
    newest = max(files, key=lambda file: (file.stat().st_mtime, str(file)))
    return [file for file in files if file.parent == newest.parent]


def _profile(file: Path) -> Profile:
    with file.open("rb") as opened:
        is_json = json_trace.looks_like(opened.read(65536))
    return json_trace.load(file) if is_json else trace.load(file)


def _modules(file: Path) -> list[HloModule]:
    try:
        return traced_modules.load(file)
    except DhelixError:  # without programs, less can be said
        return []


def _is_valid(module: HloModule) -> bool:
    try:
        verify(module)
    except DhelixError:
        return False
    return True


def _choose(kernels: Iterable[Kernel], program: str | None, source: str) -> tuple[str, list[str]]:
    """The program to look at, and a note on the others."""
    took: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        if kernel.module:
            took[kernel.module] += kernel.end - kernel.start
    if not took:
        raise DhelixError(f"{source} holds no kernel that names its program; record it while a jitted function runs")
    if program is not None and program not in took:
        names = ", ".join(sorted(took))
        raise DhelixError(f"{source} holds no kernel of the program {program!r}; it has {names}")
    chosen = program or max(took, key=lambda name: (took[name], name))
    rest = sum(ms for name, ms in took.items() if name != chosen)
    share = rest / sum(took.values())
    others = "1 other program" if len(took) == 2 else f"{len(took) - 1} other programs"
    note = f"left out: {others}, with {share:.0%} of the kernels' time"
    return chosen, [note] if share >= 0.01 else []


def _launched(profile: Profile) -> dict[str, float]:
    """When the host's calls that launched kernels ended, in milliseconds, by their numbers."""
    ends: dict[str, float] = {}
    for plane in profile.planes:
        if not (plane.name or "").startswith("/host:"):
            continue
        for line in plane.lines:
            for event in line.events:
                if not event.name.startswith(("cu", "hip")):  # cuLaunchKernel, cuGraphLaunch, cudaMemcpyAsync
                    continue
                for key, value in event.stats:
                    if key == "correlation_id":
                        ends[str(value)] = (event.start_ns + event.duration_ns) / 1e6
    return ends
