"""The launch setting of a process: which one it has, and which one a plan wants.

Some choices hold for a whole process, and change every time in it: how many connections CUDA has, whether NCCL uses
copy engines, whether buffers are symmetric memory, whether kernels start as CUDA graphs (`profiles.profile.SETTINGS`).
A plan is made for one of them. It cannot be applied once the process runs, and nothing here sets a variable: the
process is looked at when its first step is lowered, and one line says how to start it if that differs.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes.plans.plan import PlanTarget
from dhelix.profiles.profile import SETTINGS, LaunchSetting

GRAPHS = "xla_gpu_enable_command_buffer"
NO_GRAPHS: Mapping[str, str] = MappingProxyType({GRAPHS: ""})
"""XLA's options for a program without CUDA graphs."""
# Of what XLA makes CUDA graphs: usually, and of these what is no custom call and holds none.
_USUAL_KINDS = frozenset({
    "FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "CONDITIONAL"
})  # fmt: skip
_FREE_OF_CALLS = frozenset({"FUSION", "CUBLAS", "CUBLASLT", "CUDNN"})
_LINKS = ("nvlink", "no-p2p")  # of `hardware.LINKS`, those of one process

_USUAL: Mapping[str, str] = MappingProxyType({
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "NCCL_CTA_POLICY": "0",
    "NCCL_BUFFSIZE": "",
    "NCCL_MIN_NCHANNELS": "",
    "NCCL_MIN_P2P_NCHANNELS": "",
    "NCCL_SOCKET_NTHREADS": "",
    "NCCL_NSOCKS_PERTHREAD": "",
    "xla_gpu_graph_min_graph_size": "5",
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": "false",
    "xla_gpu_enable_nccl_user_buffers": "false",
})  # fmt: skip
"""What tells launch settings apart, with the values of a process that says nothing of it. XLA's usual CUDA graphs count
as none: what measures switches them off. "" stands for what NCCL takes then."""


def setting_of(environment: Mapping[str, str], options: Mapping[str, Any] | None = None) -> LaunchSetting:
    """The launch setting that a process with this environment runs under.

    Args:
      environment: variables, XLA_FLAGS among them.
      options: XLA options beside those of XLA_FLAGS, without dashes; they count more.

    Raises:
      DhelixError: there is no such setting.
    """
    here = _of_process(environment, options)
    described = {name: _unusual(s.environment, _flags(s.xla_flags)) for name, s in SETTINGS.items()}
    for name, unusual in described.items():
        if unusual == here:
            return SETTINGS[name]
    known = "; ".join(f"{name}: {_words(unusual)}" for name, unusual in described.items())
    raise DhelixError(
        f"this process was started with {_words(here)}, and no launch setting of profiles is that; start it as one of"
        f" `dhelix profile --settings` ({known})"
    )


def nearest(
    measured: Container[str], environment: Mapping[str, str], options: Mapping[str, Any] | None = None
) -> tuple[str | None, str]:
    """The launch setting whose costs count for a process, and one line if it is not the process's own.

    That is the one with the most of what is special about the process and nothing else, the first of several: a process
    with one connection and a number of channels of its own has the costs of `connections1`.

    Args:
      measured: names to take of.
      environment, options: as of `setting_of`.

    Returns:
      The name, None if there is none, and the line, "" for the process's own setting.
    """
    here = _of_process(environment, options)
    known = [setting for name, setting in SETTINGS.items() if name in measured]
    special = {setting.name: _unusual(setting.environment, _flags(setting.xla_flags)) for setting in known}
    fitting = [name for name, values in special.items() if values.items() <= here.items()]
    found = max(fitting, key=lambda name: len(special[name]), default=None)
    if found is not None and special[found] == here:
        return found, ""
    costs = "a roofline's" if found is None else f"those of the launch setting {found!r}"
    return found, f"no times of a process started with {_words(here)}: costs are {costs}; run `dhelix profile`"


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


def graphs_hold_calls(environment: Mapping[str, str], options: Mapping[str, Any] | None = None) -> bool:
    """Whether CUDA graphs that XLA makes may hold custom calls; arguments as of `setting_of`."""
    return not _kinds_in_graphs(environment, options) <= _FREE_OF_CALLS


def calls_outside_graphs(environment: Mapping[str, str]) -> dict[str, str]:
    """XLA's options for CUDA graphs without custom calls, of what the process has graphs of."""
    return {GRAPHS: ",".join(sorted(_kinds_in_graphs(environment) & _FREE_OF_CALLS))}


def _kinds_in_graphs(environment: Mapping[str, str], options: Mapping[str, Any] | None = None) -> frozenset[str]:
    """A list, or changes of the usual one: `+A,-B`."""
    flags = {**_flags(environment.get("XLA_FLAGS", "").split()), **(options or {})}
    if GRAPHS not in flags:
        return _USUAL_KINDS
    words = [word for word in str(flags[GRAPHS]).upper().replace(" ", "").split(",") if word]
    if not words or any(word[0] not in "+-" for word in words):
        return frozenset(words)
    more, less = ({word[1:] for word in words if word[0] == sign} for sign in "+-")
    return _USUAL_KINDS - less | more


def without_graphs(environment: MutableMapping[str, str]) -> None:
    """Adds the XLA flag for no CUDA graphs; of a process, before JAX looks for devices."""
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --{GRAPHS}=".strip()


def difference(
    target: PlanTarget, environment: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None
) -> str | None:
    """One line that says how to start the process for a plan with this target; None if it was started so.

    Args:
      environment: by default this process's.
      options: as of `setting_of`.
    """
    environment = os.environ if environment is None else environment
    here = _of_process(environment, options)
    wanted = _unusual(dict(target.environment), _flags(target.xla_flags))
    if here == wanted:
        return None
    unset = "".join(f" without {name}" for name in here if name not in wanted)
    return (
        f"the plan is for launch setting {target.setting!r} and this process was started with {_words(here)}; start it"
        f" with {_command(target, environment)}{unset}, or make a plan for how it is (`dhelix plan --settings`)"
    )


def _command(target: PlanTarget, environment: Mapping[str, str]) -> str:
    """What stands before the command in a shell, other XLA flags of the process kept."""
    names = _flags(target.xla_flags).keys()
    kept = [f for f in environment.get("XLA_FLAGS", "").split() if _name(f) not in (*names, *_USUAL)]
    flags = " ".join([*kept, *target.xla_flags])
    variables = [f"{name}={value}" for name, value in target.environment]
    return " ".join([*variables, *([f"XLA_FLAGS='{flags}'"] if flags else [])]) or "no setting of its own"


def _of_process(environment: Mapping[str, str], options: Mapping[str, Any] | None) -> dict[str, str]:
    return _unusual(environment, {**_flags(environment.get("XLA_FLAGS", "").split()), **(options or {})})


def _unusual(environment: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, str]:
    """What of `_USUAL` is otherwise."""
    values = {name: str({**environment, **flags}.get(name, usual)) for name, usual in _USUAL.items()}
    if flags.get(GRAPHS) == "":
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


def _name(flag: str) -> str:
    return flag.removeprefix("--").partition("=")[0]


def _words(unusual: Mapping[str, str]) -> str:
    """As one writes it to start a process."""
    parts = (f"--{name}={value}" if name.startswith("xla_") else f"{name}={value}" for name, value in unusual.items())
    return ", ".join(parts) or "nothing special"
