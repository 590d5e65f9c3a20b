"""Profiles a step in the process that runs it: the implementation of `train_step.profile(state, batch)`.

    process = this_process()                                  # its launch setting, link and GPUs
    profile(process, lowered, compiled, (args, kwargs))       # measures the operators that the profile's file lacks

`dhelix profile` starts a process for each launch setting. Here, the process is already running with a step of its own.
So `launch_settings.setting_of` derives the setting from the environment and XLA flags. Both cases measure in the same
way, with `gpu_measurer` and `measure_missing`. The processes of a job measure together, each on its own GPUs. Every
process writes the same file, so every host has the file even if the hosts share no folder.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from absl import logging

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.framework import fingerprint
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import describe, gpu_name
from dhelix.profiles.profile import LaunchSetting, Profile, Provenance
from dhelix.runtime.compiler.lowering import compiled_module, device_count, hlo_bytes, with_hlo
from dhelix.runtime.processes import agreement
from dhelix.runtime.processes.launch_settings import NO_GRAPHS, link_of, setting_of
from dhelix.runtime.processes.nodes import gpus_per_node
from dhelix.runtime.processes.records import Entry, short
from dhelix.runtime.profiling import measure
from dhelix.runtime.profiling.observe import observe
from dhelix.runtime.profiling.provenance import provenance
from dhelix.runtime.profiling.session import Progress, Session, Step

_MEMORY_SHARE = 0.5  # fraction of the free GPU memory that arguments of measuring programs may take


@dataclass(frozen=True)
class Process:
    """The GPUs to measure on, and the launch setting and XLA options of this process."""

    setting: LaunchSetting
    link: str
    provenance: Provenance
    options: Mapping[str, Any] = MappingProxyType({})
    """XLA options of the step, in addition to the options in XLA_FLAGS."""

    @property
    def gpu(self) -> str:
        return gpu_name(self.provenance.gpu)


def this_process(link: str | None = None, options: Mapping[str, Any] | None = None) -> Process:
    """Describes this process.

    Args:
      link: link between the process's GPUs, "nvlink" or "no-p2p"; default: the link that NCCL_P2P_DISABLE implies.
      options: XLA options of the step that are not in XLA_FLAGS.

    Raises:
      DhelixError: the process has no GPU, its environment and options match no launch setting, or `link` contradicts
        NCCL_P2P_DISABLE.
    """
    if jax.default_backend() != "gpu":
        raise DhelixError(
            f"profiling needs GPUs, but this process runs on {jax.default_backend()}; see `nvidia-smi` and pip install "
            "'dhelix[gpu]'"
        )
    options = dict(options or {})
    return Process(setting_of(os.environ, options), link_of(os.environ, link), provenance(), options)


def profile(
    process: Process,
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    out: str | Path | None = None,
    pairs: bool = True,
    again: bool = False,
    progress: Progress | bool = True,
) -> Profile:
    """Measures those operators of a step that have no time in the profile's file. Returns the file's new content.

    Args:
      process: see `this_process`.
      lowered, compiled: the step as it will run.
      arguments: args and kwargs for `compiled`. They are not donated. If they contain `jax.ShapeDtypeStruct`s or
        keywords, the step itself does not run. All times then come from programs that run its operators alone and in
        pairs.
      out: the profile's file; default: the file that `dhelix profile` writes.
      pairs, again: see `Session`.
      progress: function that is called as in `Progress`; True writes lines to the log, and False reports nothing.

    Raises:
      DhelixError: the file is no profile of these GPUs or cannot be written, or the step does not run on GPUs.
    """
    gpu, link, setting = process.gpu, process.link, process.setting
    executable: Any = compiled.runtime_executable()
    devices = jax_compat.devices(lowered) or executable.local_devices()  # in the order of the step's device numbers
    gpus = gpus_per_node(devices) or device_count(lowered)
    path = Path(out) if out else storage.users_file(gpu, link)
    here = Profile(gpu, link, (process.provenance,))
    known_here = agreement.together("read the profile", lambda: storage.dumps(_known(path, here)), (DhelixError,))
    told = agreement.gathered("compare the profiles", known_here)
    known = storage.loads(told[0], "what the first process knows")
    measurer = gpu_measurer(setting, devices, process.options)
    session = Session(known, setting.name, measurer, describe(gpu, link), gpus, pairs, again)

    def trace(step: Step) -> Step:
        make_arguments = functools.partial(copies, arguments[0])
        return observe(step, _without_marker(lowered), make_arguments, gpus, setting.implementation)

    def save(grown: Profile) -> None:
        agreement.together("write the profile", lambda: storage.save(grown, path), (DhelixError,))

    speaks = jax.process_index() == 0
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arguments))
    return measure_missing(
        session,
        Step(compiled_module(compiled)),
        None if abstract or arguments[1] else trace,
        progress if callable(progress) else _log if progress and speaks else _silent,
        save,
    )


def copies(arguments: Any) -> Any:
    """The same pytree with copies of its arrays, for a step that donates them."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, arguments)


def gpu_measurer(
    setting: LaunchSetting, devices: Sequence[Any] | None = None, options: Mapping[str, Any] | None = None
) -> measure.GpuMeasurer:
    """Returns the measurer for a launch setting.

    Args:
      setting: the launch setting.
      devices: GPUs of a step; the step's state may already occupy a part of their memory. None: all GPUs of the job,
        with free memory.
      options: XLA options, in addition to the options of the setting.
    """
    options = {**(options or {}), **({} if setting.graphs else NO_GRAPHS)}
    marks = setting.graphs or setting.implementation != "nccl"
    if devices is None:
        return measure.GpuMeasurer(options=options, marks=marks)
    own = next(device for device in devices if device.process_index == jax.process_index())
    return measure.GpuMeasurer(devices, options, _memory_left(own), marks)


def measure_missing(
    session: Session,
    step: Step,
    trace: Callable[[Step], Step] | None,
    progress: Progress,
    save: Callable[[Profile], None],
) -> Profile:
    """Measures what the session's profile lacks, and returns the extended profile.

    If the profile lacks anything, the step itself runs under the profiler first.

    Args:
      session: the session.
      step: the step to profile.
      trace: calls `observe` for the step; None if the step cannot be run.
      progress, save: see `Session.run`.
    """
    wanted = session.missing(step)
    keys = [" beside ".join(str(o.key) for o in item.operators) for item in (*wanted.alone, *wanted.pairs)]
    agreement.check("measure a step", [Entry("operators to measure", short("; ".join(keys)))])
    if trace is not None and len(wanted):
        progress(0, 0, "traces the step")
        step = trace(step)
    return session.run(step, progress, save)


def _known(path: Path, here: Profile) -> Profile:
    """Returns the profile in the file, with the provenance of `here` added. Returns `here` if there is no file."""
    found = storage.of_hardware(path, here.hardware, here.link, "out=")
    if found is None:
        return here
    for line in storage.differences(found, here.measured_on[0]):
        logging.warning("dhelix: %s", line)
    return found.merged(here)


def _without_marker(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """The same program under a name for which no compiler hook is registered.

    With the hook, scheduling passes would overlap collectives with compute. Then a trace would not contain times of
    operators that run alone. Also, the step's report would include this compilation.
    """
    module = hlo_bytes(lowered)
    if fingerprint.marker_of(module) is None:
        return lowered
    return with_hlo(lowered, module, fingerprint.unmark(fingerprint.module_name(module)))


def _memory_left(device: Any) -> int | None:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return max(int(_MEMORY_SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))), 1)


def _log(done: int, total: int, what: str) -> None:
    """Logs the progress as a warning, because absl shows lower levels only if the program asks for them."""
    logging.warning("dhelix: profile: %s%s", f"{done} of {total}, " if total else "", what)


def _silent(done: int, total: int, what: str) -> None:
    pass
