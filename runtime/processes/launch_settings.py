"""Finds the launch setting of this process, and compares it with the launch setting of a plan.

A launch setting is a set of choices that hold for a whole process and change all times that are measured in it
(`profiles.profile.SETTINGS`). The choices are the number of CUDA connections, whether NCCL uses copy engines, whether
buffers are symmetric memory, and whether kernels start as CUDA graphs. A launch setting cannot change while the process
runs. A plan is made for one launch setting. When the first step is lowered, this module compares the two settings. If
they differ, one line in the log says how to start the process. Only `without_graphs` sets environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, MutableMapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.plans.plan import PlanTarget
from dhelix.profiles.profile import SETTINGS, LaunchSetting

GRAPHS = "xla_gpu_enable_command_buffer"
NO_GRAPHS: Mapping[str, str] = MappingProxyType({GRAPHS: ""})
"""XLA options for a program without CUDA graphs."""
# The kinds of commands that XLA puts into CUDA graphs by default, and those of these kinds that hold no custom calls.
_USUAL_KINDS = frozenset({
    "FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "CONDITIONAL"
})  # fmt: skip
_FREE_OF_CALLS = frozenset({"FUSION", "CUBLAS", "CUBLASLT", "CUDNN"})
_LINKS = ("nvlink", "no-p2p")  # the links in `hardware.LINKS` that can connect the GPUs of one process

_USUAL: Mapping[str, str] = MappingProxyType({
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "NCCL_CTA_POLICY": "0",
    "NCCL_BUFFSIZE": "",
    "NCCL_MIN_NCHANNELS": "",
    "NCCL_MIN_P2P_NCHANNELS": "",
    "NCCL_NTHREADS": "",
    "NCCL_P2P_PCI_CHUNKSIZE": "",
    "NCCL_P2P_NET_CHUNKSIZE": "",
    "NCCL_SHM_LOCALITY": "",
    "NCCL_SOCKET_NTHREADS": "",
    "NCCL_NSOCKS_PERTHREAD": "",
    "xla_gpu_graph_min_graph_size": "5",
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": "false",
    "xla_gpu_enable_nccl_user_buffers": "false",
})  # fmt: skip
"""The variables and flags that distinguish launch settings, with their defaults. "" means NCCL's own default. A process
with XLA's default CUDA graphs counts as one without graphs, because profiling such a process switches graphs off."""


def setting_of(environment: Mapping[str, str], options: Mapping[str, Any] | None = None) -> LaunchSetting:
    """Returns the launch setting of a process with this environment.

    Args:
      environment: environment variables, including XLA_FLAGS.
      options: further XLA options without leading dashes. They override XLA_FLAGS.

    Raises:
      DhelixError: no launch setting matches the process.
    """
    here = _of_process(environment, options)
    described = {name: _unusual(s.environment, _flags(s.xla_flags)) for name, s in SETTINGS.items()}
    for name, unusual in described.items():
        if unusual == here:
            return SETTINGS[name]
    known = "; ".join(f"{name}: {_words(unusual)}" for name, unusual in described.items())
    raise DhelixError(
        f"this process was started with {_words(here)}, which is no launch setting of profiles; start it with one of "
        f"`dhelix profile --settings` ({known})"
    )


def nearest(
    measured: Container[str], environment: Mapping[str, str], options: Mapping[str, Any] | None = None
) -> tuple[str | None, str]:
    """Returns the measured launch setting that is nearest to a process's setting. Its costs are used for the process.

    A setting fits if the process also has all the non-default values of the setting. Among the fitting settings, the
    one with the most non-default values is nearest. If several have equally many, the first one in SETTINGS is nearest.
    For example, a process with one connection and an unusual number of channels gets the costs of `connections1`.

    Args:
      measured: names of the settings to choose from.
      environment, options: as in `setting_of`.

    Returns:
      The name of the setting, or None if no setting fits; and a line for the log, or "" if the setting has exactly the
      values of the process.
    """
    here = _of_process(environment, options)
    known = [setting for name, setting in SETTINGS.items() if name in measured]
    special = {setting.name: _unusual(setting.environment, _flags(setting.xla_flags)) for setting in known}
    fitting = [name for name, values in special.items() if values.items() <= here.items()]
    found = max(fitting, key=lambda name: len(special[name]), default=None)
    if found is not None and special[found] == here:
        return found, ""
    costs = "a roofline's" if found is None else f"those of the launch setting {found!r}"
    line = f"no times were measured with {_words(here)}, so costs are {costs}; run `dhelix profile`"
    return found, line


def target_of(gpu: str, link: str, gpus_per_node: int, options: Mapping[str, Any] | None = None) -> PlanTarget:
    """The target of plans that are made in this process: its GPUs, and the variables and flags that it has.

    The launch setting is the nearest one (`nearest`). If none fits, it is the default.
    """
    name = nearest(SETTINGS, os.environ, options)[0] or "default"
    unusual = _of_process(os.environ, options)
    environment = tuple(sorted((n, value) for n, value in unusual.items() if not n.startswith("xla_")))
    return replace(PlanTarget.of(gpu, link, name, gpus_per_node), environment=environment)


def link_of(environment: Mapping[str, str], link: str | None = None) -> str:
    """Returns the link between GPUs: `link` if it is given, or else the link that NCCL_P2P_DISABLE implies.

    Raises:
      DhelixError: `link` is unknown, or contradicts NCCL_P2P_DISABLE.
    """
    disabled = environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0")
    if link is None:
        return "no-p2p" if disabled else "nvlink"
    if link not in _LINKS:
        raise DhelixError(f"link={link!r} is not possible for GPUs of one process; use one of {', '.join(_LINKS)}")
    if disabled and link != "no-p2p":
        raise DhelixError(f"link={link!r}, but NCCL_P2P_DISABLE is set: unset it, or leave out link")
    return link


def graphs_hold_calls(environment: Mapping[str, str], options: Mapping[str, Any] | None = None) -> bool:
    """Whether the CUDA graphs that XLA makes may contain custom calls. The arguments are those of `setting_of`."""
    return not _kinds_in_graphs(environment, options) <= _FREE_OF_CALLS


def calls_outside_graphs(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns XLA options that keep custom calls out of the process's CUDA graphs."""
    return {GRAPHS: ",".join(sorted(_kinds_in_graphs(environment) & _FREE_OF_CALLS))}


def _kinds_in_graphs(environment: Mapping[str, str], options: Mapping[str, Any] | None = None) -> frozenset[str]:
    """The kinds of commands that XLA puts into CUDA graphs.

    The flag's value is a list of kinds, or a list of changes to the default kinds (`+A,-B`).
    """
    flags = {**_flags(environment.get("XLA_FLAGS", "").split()), **(options or {})}
    if GRAPHS not in flags:
        return _USUAL_KINDS
    words = [word for word in str(flags[GRAPHS]).upper().replace(" ", "").split(",") if word]
    if not words or any(word[0] not in "+-" for word in words):
        return frozenset(words)
    more, less = ({word[1:] for word in words if word[0] == sign} for sign in "+-")
    return _USUAL_KINDS - less | more


def without_graphs(environment: MutableMapping[str, str]) -> None:
    """Adds the XLA flag that switches CUDA graphs off. It has an effect only before JAX looks for devices."""
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --{GRAPHS}=".strip()


def difference(
    target: PlanTarget, environment: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None
) -> str | None:
    """Returns one line that says how to start the process for a plan, or None if the process already fits the plan.

    Args:
      target: target of the plan.
      environment: environment variables; default: the variables of this process.
      options: as in `setting_of`.
    """
    environment = os.environ if environment is None else environment
    here = _of_process(environment, options)
    wanted = _unusual(dict(target.environment), _flags(target.xla_flags))
    if here == wanted:
        return None
    unset = "".join(f" without {name}" for name in here if name not in wanted)
    return (
        f"the plan is for launch setting {target.setting!r}, but this process was started with {_words(here)}; start "
        f"it with {_command(target, environment)}{unset}, or make a plan for its setting (`dhelix plan --settings`)"
    )


def _command(target: PlanTarget, environment: Mapping[str, str]) -> str:
    """The variables to put before the command in a shell. The value of XLA_FLAGS keeps the process's other flags."""
    names = _flags(target.xla_flags).keys()
    kept = [f for f in environment.get("XLA_FLAGS", "").split() if _name(f) not in (*names, *_USUAL)]
    flags = " ".join([*kept, *target.xla_flags])
    variables = [f"{name}={value}" for name, value in target.environment]
    return " ".join([*variables, *([f"XLA_FLAGS='{flags}'"] if flags else [])]) or "no setting of its own"


def _of_process(environment: Mapping[str, str], options: Mapping[str, Any] | None) -> dict[str, str]:
    return _unusual(environment, {**_flags(environment.get("XLA_FLAGS", "").split()), **(options or {})})


def _unusual(environment: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, str]:
    """The entries of `_USUAL` whose values are not the defaults."""
    values = {name: str({**environment, **flags}.get(name, usual)) for name, usual in _USUAL.items()}
    if flags.get(GRAPHS) == "":
        del values["xla_gpu_graph_min_graph_size"]  # no graphs, so their size does not matter
    switches = {"1": "true", "": "true", "0": "false"}
    for name in values:
        if _USUAL[name] in ("true", "false"):
            values[name] = switches.get(values[name], values[name].lower())
    return {name: value for name, value in values.items() if value != _USUAL[name]}


def _flags(words: Iterable[str]) -> dict[str, str]:
    """Parses flags of the form `--name=value`. If a flag occurs twice, the last counts. A missing value is "true"."""
    parts = (word.removeprefix("--").partition("=") for word in words)
    return {name: value if equals else "true" for name, equals, value in parts}


def _name(flag: str) -> str:
    return flag.removeprefix("--").partition("=")[0]


def _words(unusual: Mapping[str, str]) -> str:
    """The non-default values as a user writes them to start a process."""
    parts = (f"--{name}={value}" if name.startswith("xla_") else f"{name}={value}" for name, value in unusual.items())
    return ", ".join(parts) or "nothing special"
