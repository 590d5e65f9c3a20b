"""Describes the properties of a step and its process that must be equal in all processes of a job.

There are three records:

- The first record is known before tracing. It says whether dhelix is on, and contains versions, the step's options and
  XLA's options.
- The second record is known before XLA compiles. It contains the costs, passes and memory limit that follow from the
  options on this process's GPUs.
- The third record is known after compilation. It is the order of collectives.

Values are short texts that a message can show. A digest stands for a plan, a profile or a long option. Settings that do
not change the program are not compared: folders of dumps and caches, paths of files with the same content, and the
number of compiler threads. "Left alone" means that a step runs without passes, as under `jax.jit`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from dhelix.passes import jax_compat
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.manager import Pass, PassManager
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan
from dhelix.profiles.profile import Profile
from dhelix.runtime.compiler import registration
from dhelix.runtime.processes.records import Entry, Record, short

_SWITCH_ADVICE = "Set the same value on every host"
_VERSION_ADVICE = "Install the same versions on every host"
_OPTION_ADVICE = "Decorate the step in the same way on every host"
_FLAG_ADVICE = "Give every process the same XLA options"
_SHAPE_ADVICE = "Give the step arguments of the same shapes on every host, also for the last batch"
_CHOICE_ADVICE = "See the log of the host that differs; every host needs the same GPUs, profile and plan files"

_ALWAYS = ("microbatches", "reduce", "pipeline", "sharding")  # options that also apply with DHELIX=off
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# XLA flags that each host may set for itself: where files are written or kept, and how many threads compile.
_OWN_FLAGS = re.compile(
    "dump|cache_(dir|file|mode)|cuda_data_dir|compilation_parallelism|parallel_codegen|host_platform_device_count"
)


def before_tracing(enabled: bool, options: Mapping[str, object], jitted: Any) -> Record:
    """Returns the record that must be equal in all processes before a step is traced.

    If dhelix is off, the record contains only this fact and the options that split the batch.

    Args:
      enabled: whether passes may run.
      options: options of `strand_interleave`, by name.
      jitted: the step as `jax.jit` returned it.
    """
    by_jax = not enabled and registration.enabled()
    note = "by jax_disable_jit, jax_debug_nans or jax_debug_infs" if by_jax else ""
    switch = Entry("DHELIX", "on" if enabled else "off", note, _SWITCH_ADVICE)
    asked = {
        name: Entry(name, _value(value), advice=_OPTION_ADVICE)
        for name, value in options.items()
        if enabled or name in _ALWAYS
    }
    if not enabled:
        return [switch, *asked.values()]
    compiler_options = {str(name): _text(value) for name, value in jax_compat.xla_options(jitted).items()}
    return [
        switch,
        *(Entry(name, version, advice=_VERSION_ADVICE) for name, version in versions().items()),
        *asked.values(),
        Entry("options of jax.jit", _texts(jax_compat.jit_settings(jitted)), advice=_OPTION_ADVICE),
        Entry("compiler_options", _shared_flags(compiler_options), advice=_FLAG_ADVICE),
        Entry("XLA_FLAGS", xla_flags(os.environ.get("XLA_FLAGS", "")), advice=_FLAG_ADVICE),
    ]


def before_compiling(
    lowered: jax.stages.Lowered, manager: PassManager | None, memory_limit: int | None, left_alone: str | None
) -> Record:
    """Returns the record that must be equal in all processes before XLA compiles.

    If the step is left alone, the record contains only this fact.

    Args:
      lowered: the lowered step before any pass.
      manager: holds the passes that run; None if no pass runs.
      memory_limit: bytes that the step may need on a GPU, or None if there is no limit.
      left_alone: the reason if the step is left alone, or None.
    """
    runs = Entry(
        "what runs", "transformed" if left_alone is None else "as jax.jit runs it", left_alone or "", _CHOICE_ADVICE
    )
    if left_alone is not None or manager is None:
        return [runs]
    costs = _costs(manager.enabled)
    return [
        runs,
        Entry("arguments", _shapes(lowered), advice=_SHAPE_ADVICE),
        Entry("memory limit found", str(memory_limit), advice=_CHOICE_ADVICE),
        Entry("costs found", costs, advice=_CHOICE_ADVICE),
        Entry("passes chosen", _passes(manager.enabled), advice=_CHOICE_ADVICE),
    ]


def after_compiling(order: str | None, marker: str) -> Record:
    """Returns the record that must be equal in all processes before the compiled step runs.

    It contains only the order of collectives. The programs may differ in other ways. For example, the program of one
    host may print, or may contain a constant of its own.

    Args:
      order: fingerprint of the order of collectives; None if the step is left alone.
      marker: fingerprint of the program and of the passes' other inputs. Messages show it, but it is not compared.
    """
    if order is None:
        return [Entry("the order of collectives", "that of the plain step")]
    return [Entry("the order of collectives", order, f"of program {marker}")]


def versions() -> dict[str, str]:
    """Returns the versions of the packages that make the executable.

    For jax and jaxlib, the text also has the installed version if the running version differs from it.
    """
    found = fingerprint.versions()
    result = {"version of dhelix": found["dhelix"], "sources of dhelix": found["dhelix sources"]}
    for name, running in (("jax", jax.__version__), ("jaxlib", jaxlib.version.__version__)):
        alike = found[name] == running
        result[f"version of {name}"] = running if alike else f"{running}, installed as {found[name]}"
    for plugin in _PLUGINS:
        try:
            result[f"version of {plugin}"] = importlib.metadata.version(plugin)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def xla_flags(flags: str) -> dict[str, str]:
    """Returns the flags in XLA_FLAGS that change the compiled program. If a flag occurs twice, the last one counts."""
    flags = flags.strip()
    if flags and not flags.startswith("-") and (text := _read(flags)) is not None:
        flags = text.decode(errors="replace")  # XLA_FLAGS may name a file of flags
    parts = (word.partition("=") for word in flags.split())
    return _shared_flags({name: value if equals else "true" for name, equals, value in parts})


def _shared_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Returns `flags` without flags that each host may set for itself. Digests of files replace the paths of files."""
    shared = {name: value for name, value in flags.items() if not _OWN_FLAGS.search(name)}
    contents = {name: _read(value) if "/" in value else None for name, value in shared.items()}
    return {
        name: short(value) if (content := contents[name]) is None else _digest(content)
        for name, value in shared.items()
    }


def _value(value: object) -> str | dict[str, str]:
    """The value of an option, as messages show it."""
    if value is None:
        return "none"
    if isinstance(value, Plan):
        return f"{short(value.program)} ({_digest(plan_files.dumps(value).encode())})"
    if isinstance(value, Profile):
        # The text of a profile's file would not do. It lacks the times of other GPUs that stand in for missing times.
        text = json.dumps(fingerprint.plain(value, _kind), sort_keys=True)
        return f"{value.hardware} with link {value.link} ({_digest(text.encode())})"
    if isinstance(value, Mapping):
        return _texts(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and any(hasattr(one, "run") for one in value):
        return _passes(value)
    if isinstance(value, Collection) and not isinstance(value, str):
        return ", ".join(sorted(map(_text, value))) or "none"
    return _text(value)


def _passes(passes: Sequence[Pass]) -> dict[str, str]:
    """The options of each pass, by its number and name. Long options become a digest; they may include a profile."""
    options = (json.dumps(fingerprint.plain(one, _kind), sort_keys=True) for one in passes)
    return {
        f"{number} {one.name}": text if len(text) < 80 else _digest(text.encode())
        for number, (one, text) in enumerate(zip(passes, options, strict=True), 1)
    }


def _shapes(lowered: jax.stages.Lowered) -> dict[str, str]:
    """The types and shapes of the arrays in each argument, by the argument's number or name."""
    args, kwargs = lowered.in_avals
    named = {**{f"[{number}]": argument for number, argument in enumerate(args)}, **kwargs}
    return {
        str(name): short(", ".join(one.str_short() for one in jax.tree.leaves(argument))) or "no arrays"
        for name, argument in named.items()
    }


def _costs(passes: Sequence[Pass]) -> str:
    """The profile and launch setting of the passes' costs, taken from the first pass that has a cost model."""
    for one in passes:
        model = getattr(one, "model", None)
        if isinstance(model, CostModel):
            return f"{_value(model.profile)} under setting {model.setting}"
    return "none measured"


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {str(name): _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, str):
        return short(value)
    return short(json.dumps(fingerprint.plain(value, _kind), sort_keys=True))


def _kind(value: object) -> str:
    """The name of a value's type. It stands for a value whose text may differ between hosts."""
    return type(value).__name__


def _digest(content: bytes) -> str:
    return fingerprint.of_bytes(content)


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError):
        return None
