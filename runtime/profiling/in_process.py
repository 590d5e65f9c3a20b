"""Profiles a step in the process that runs it: what `train_step.profile(state, batch)` does.

    process = this_process()                                  # its launch setting, link and GPUs
    profile(process, lowered, compiled, (args, kwargs))       # measures what the profile's file lacks of the step

`dhelix profile` starts a process for each launch setting. A process that holds the GPUs for a step of its own was
started already: which setting that was, `setting_of` tells by environment and XLA flags. What is measured then, and
how, is the same for both (`gpu_measurer`, `measure_missing`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from absl import logging

from dhelix.errors import DhelixError
from dhelix.passes import fingerprint
from dhelix.profiles import storage
from dhelix.profiles.hardware import describe, gpu_name
from dhelix.profiles.profile import SETTINGS, LaunchSetting, Profile, Provenance
from dhelix.runtime.lowering import compiled_module, device_count, hlo_bytes, with_hlo
from dhelix.runtime.profiling import measure
from dhelix.runtime.profiling.observe import NO_GRAPHS, observe
from dhelix.runtime.profiling.provenance import provenance
from dhelix.runtime.profiling.session import Progress, Session, Step

_LINKS = ("nvlink", "no-p2p")  # of `hardware.LINKS`, those of one process
_MEMORY_SHARE = 0.5  # of what the process has left, for arguments of measuring programs

_USUAL: Mapping[str, str] = MappingProxyType({
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "NCCL_CTA_POLICY": "0",
    "xla_gpu_graph_min_graph_size": "5",
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": "false",
    "xla_gpu_enable_nccl_user_buffers": "false",
})  # fmt: skip
"""What tells launch settings apart, with the values of a process that says nothing of it. XLA's usual CUDA graphs
count as none: `gpu_measurer` switches them off."""


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
      DhelixError: it has no GPU, is one of several of a job, or no launch setting describes how it was started.
    """
    if jax.process_count() > 1:
        raise DhelixError(
            f"a step is profiled by one process with all GPUs of a node, and this job has {jax.process_count()}:"
            " profile the step on one node alone, without jax.distributed"
        )
    if jax.default_backend() != "gpu":
        raise DhelixError(
            f"profiling needs GPUs, and this process runs on {jax.default_backend()}; see `nvidia-smi` and"
            " pip install 'dhelix[gpu]'"
        )
    options = dict(options or {})
    return Process(setting_of(os.environ, options), link_of(os.environ, link), provenance(), options)


def setting_of(environment: Mapping[str, str], options: Mapping[str, Any] | None = None) -> LaunchSetting:
    """The launch setting that a process with this environment runs under.

    Args:
      environment: variables, XLA_FLAGS among them.
      options: XLA options beside those of XLA_FLAGS, without dashes; they count more.

    Raises:
      DhelixError: there is no such setting.
    """
    here = _unusual(environment, {**_flags(environment.get("XLA_FLAGS", "").split()), **(options or {})})
    described = {name: _unusual(s.environment, _flags(s.xla_flags)) for name, s in SETTINGS.items()}
    for name, unusual in described.items():
        if unusual == here:
            return SETTINGS[name]
    known = "; ".join(f"{name}: {_words(unusual)}" for name, unusual in described.items())
    raise DhelixError(
        f"this process was started with {_words(here)}, and no launch setting of profiles is that; start it as one of"
        f" `dhelix profile --settings` ({known})"
    )


def link_of(environment: Mapping[str, str], link: str | None = None) -> str:
    """How GPUs reach each other, by NCCL's environment unless `link` says. Raises DhelixError if it cannot be that."""
    disabled = environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0")
    if link is None:
        return "no-p2p" if disabled else "nvlink"
    if link not in _LINKS:
        raise DhelixError(f"link={link!r}: GPUs of one process reach each other by one of {', '.join(_LINKS)}")
    if disabled and link != "no-p2p":
        raise DhelixError(f"link={link!r}, but NCCL_P2P_DISABLE is set: unset it, or leave link away")
    return link


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
    gpu, link, setting, gpus = process.gpu, process.link, process.setting, device_count(lowered)
    path = Path(out) if out else storage.users_file(gpu, link)
    known = _known(path, Profile(gpu, link, (process.provenance,)))
    measurer = gpu_measurer(setting, compiled, process.options)
    session = Session(known, setting.name, measurer, describe(gpu, link), gpus, pairs, again)

    def trace(step: Step) -> Step:
        return observe(step, _without_marker(lowered), arguments[0], gpus, setting.implementation)

    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arguments))
    return measure_missing(
        session,
        Step(compiled_module(compiled)),
        None if abstract or arguments[1] else trace,
        progress if callable(progress) else _log if progress else _silent,
        lambda grown: storage.save(grown, path),
    )


def gpu_measurer(
    setting: LaunchSetting, compiled: jax.stages.Compiled | None = None, options: Mapping[str, Any] | None = None
) -> measure.GpuMeasurer:
    """What measures under a setting.

    Args:
      compiled: a step whose GPUs are used, and whose state may lie in their memory; None: all GPUs of the process.
      options: of XLA, beside those of the setting.
    """
    options = {**(options or {}), **({} if setting.graphs else NO_GRAPHS)}
    marks = setting.graphs or setting.implementation != "nccl"
    if compiled is None:
        return measure.GpuMeasurer(options=options, marks=marks)
    executable: Any = compiled.runtime_executable()
    devices = executable.local_devices()  # in the order that the step numbers them
    return measure.GpuMeasurer(devices, options, _memory_left(devices[0]), marks)


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
    if trace is not None and not session.complete(step):
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


def _unusual(environment: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, str]:
    """What of `_USUAL` is otherwise."""
    values = {name: str({**environment, **flags}.get(name, usual)) for name, usual in _USUAL.items()}
    if flags.get("xla_gpu_enable_command_buffer") == "":
        del values["xla_gpu_graph_min_graph_size"]  # no graph of any size
    switches = {"1": "true", "": "true", "0": "false"}
    for name in values:
        if _USUAL[name] in ("true", "false"):
            values[name] = switches.get(values[name], values[name].lower())
    return {name: value for name, value in values.items() if value != _USUAL[name]}


def _flags(words: Iterable[str]) -> dict[str, str]:
    """`--name=value` as a mapping; the last of several counts, and one without a value is switched on."""
    parts = (word.removeprefix("--").partition("=") for word in words)
    return {name: value if equals else "true" for name, equals, value in parts}


def _words(unusual: Mapping[str, str]) -> str:
    """As one writes it to start a process."""
    parts = (f"--{name}={value}" if name.startswith("xla_") else f"{name}={value}" for name, value in unusual.items())
    return ", ".join(parts) or "nothing special"
