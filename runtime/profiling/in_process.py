"""Profiles a step in the process that runs it: what `train_step.profile(state, batch)` does.

    process = this_process()                                  # its launch setting, link and GPUs
    profile(process, lowered, compiled, (args, kwargs))       # measures what the profile's file lacks of the step

`dhelix profile` starts a process for each launch setting. A process that holds the GPUs for a step of its own was
started already: which setting that was, `launch_settings.setting_of` tells by environment and XLA flags. What is
measured then, and how, is the same for both (`gpu_measurer`, `measure_missing`). The processes of a job measure
together, each on its own GPUs, and every one writes the same file, so that all find the same where hosts share no
folder.
"""

from __future__ import annotations

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

_MEMORY_SHARE = 0.5  # of what the process has left, for arguments of measuring programs


@dataclass(frozen=True)
class Process:
    """What is measured on, and how it was started."""

    setting: LaunchSetting
    link: str
    provenance: Provenance
    options: Mapping[str, Any] = MappingProxyType({})
    """Of XLA for the step, beside those of the environment."""

    @property
    def gpu(self) -> str:
        return gpu_name(self.provenance.gpu)


def this_process(link: str | None = None, options: Mapping[str, Any] | None = None) -> Process:
    """Of this process.

    Args:
      link: how its GPUs reach each other, if the environment does not say: "nvlink" or "no-p2p".
      options: XLA options of the step that are not in XLA_FLAGS.

    Raises:
      DhelixError: it has no GPU, or no launch setting describes how it was started.
    """
    if jax.default_backend() != "gpu":
        raise DhelixError(
            f"profiling needs GPUs, and this process runs on {jax.default_backend()}; see `nvidia-smi` and"
            " pip install 'dhelix[gpu]'"
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
    """Measures what the profile's file lacks of a step, and returns what the file then holds.

    Args:
      lowered, compiled: the step as it will run.
      arguments: what `compiled` is called with, args and kwargs. They are not used up. With `jax.ShapeDtypeStruct`s
        or keywords among them the step is not traced, and all its operators are run alone.
      out: the file; by default the one that `dhelix profile` writes.
      pairs, again: see `Session`.
      progress: told how far it is; True writes lines to the log.

    Raises:
      DhelixError: the file holds something else or cannot be written, or the step does not run on GPUs.
    """
    gpu, link, setting = process.gpu, process.link, process.setting
    executable: Any = compiled.runtime_executable()
    devices = jax_compat.devices(lowered) or executable.local_devices()  # in the order that the step numbers them
    gpus = gpus_per_node(devices) or device_count(lowered)
    path = Path(out) if out else storage.users_file(gpu, link)
    here = Profile(gpu, link, (process.provenance,))
    known_here = agreement.together("read the profile", lambda: storage.dumps(_known(path, here)), (DhelixError,))
    told = agreement.gathered("compare the profiles", known_here)
    known = storage.loads(told[0], "what the first process knows")
    measurer = gpu_measurer(setting, devices, process.options)
    session = Session(known, setting.name, measurer, describe(gpu, link), gpus, pairs, again)

    def trace(step: Step) -> Step:
        return observe(step, _without_marker(lowered), arguments[0], gpus, setting.implementation)

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


def gpu_measurer(
    setting: LaunchSetting, devices: Sequence[Any] | None = None, options: Mapping[str, Any] | None = None
) -> measure.GpuMeasurer:
    """What measures under a setting.

    Args:
      devices: GPUs of a step, whose state may lie in their memory; None: all GPUs of the job, with nothing on them.
      options: of XLA, beside those of the setting.
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
    """Measures what the session's profile lacks, first by a trace of the step if it lacks anything.

    Args:
      trace: `observe` of the step; None if it cannot be run.
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
    """What the file holds, if there is one, and that `here` is measured on, too."""
    found = storage.of_hardware(path, here.hardware, here.link, "out=")
    if found is None:
        return here
    for line in storage.differences(found, here.measured_on[0]):
        logging.warning("dhelix: %s", line)
    return found.merged(here)


def _without_marker(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """The same program under a name that no hook knows. Scheduling passes would lay collectives under compute, where
    a trace gives no times alone; and the step's report would tell of this compilation."""
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
    """A warning, because absl shows nothing below unless the program asks for it."""
    logging.warning("dhelix: profile: %s%s", f"{done} of {total}, " if total else "", what)


def _silent(done: int, total: int, what: str) -> None:
    pass
