"""`dhelix flags`: environment variables and flags for a job, and what is wrong with those that it has.

dhelix flags --link no-p2p        # what to set, why, and what it was worth
dhelix flags --check              # what is wrong with this shell's
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from dhelix.errors import DhelixError
from dhelix.launch.hosts.variables import checks
from dhelix.launch.shown.progress import say
from dhelix.profiles.launching import effects
from dhelix.profiles.launching.reasons import REASONS
from dhelix.profiles.profile import FASTEST, SETTINGS


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs `dhelix flags` and returns its exit status. Raises DhelixError if the command line is wrong."""
    chosen = values.flag_values_dict()
    if arguments:
        raise DhelixError(f"{arguments[0]!r} is not a flag; see `dhelix flags --help`")
    if chosen["check"] and (chosen["shell"] or chosen["setting"]):
        raise DhelixError("--check looks at this shell's variables; leave out --shell and --setting")
    link = chosen["link"] or ("no-p2p" if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0") else "nvlink")
    console = Console(width=None if sys.stdout.isatty() else 144, highlight=False)
    if chosen["check"]:
        return _check(link, chosen["json"], console)
    name = chosen["setting"] or FASTEST[link]
    variables = variables_of(name)
    if chosen["json"]:
        found = [vars(effect) for effect in effects.of(link, name)]
        print(json.dumps({"link": link, "setting": name, "environment": variables, "effects": found}, indent=1))
    elif chosen["shell"]:
        print(_shell(variables))
    else:
        _show(link, name, variables, console)
    return 0


def variables_of(setting: str) -> dict[str, str]:
    """The variables of a launch setting for training, XLA_FLAGS last."""
    known = SETTINGS[setting]
    xla = " ".join(known.training_flags)
    return {**known.environment, **({"XLA_FLAGS": xla} if xla else {})}


def _show(link: str, name: str, variables: Mapping[str, str], console: Console) -> None:
    say(console, f"For GPUs linked by {link}: launch setting {name} ({SETTINGS[name].summary}).")
    found = effects.of(link, name)
    said = "; ".join(map(str, found)) or "no whole step was measured under both"
    say(console, f"Against the default setting, in the same run: {said}.")
    table = Table(show_edge=False, pad_edge=False)
    for column in ("set", "to", "because"):
        table.add_column(column, overflow="fold")
    flags_too = checks.xla_flags(variables.get("XLA_FLAGS", ""))
    for variable, value in {**{n: v for n, v in variables.items() if n != "XLA_FLAGS"}, **flags_too}.items():
        spelled = f"--{variable}" if variable.startswith("xla_") else variable
        table.add_row(spelled, value, REASONS.get(variable, ""))
    console.print(table)
    say(console, "")
    say(console, _shell(variables) or "# nothing to set")


def _shell(variables: Mapping[str, str]) -> str:
    """Shell commands that set the variables. XLA_FLAGS keeps the flags that it has."""
    lines = []
    for name, value in variables.items():
        text = f'"${{XLA_FLAGS:-}} {value}"' if name == "XLA_FLAGS" else shlex.quote(value)
        lines.append(f"export {name}={text}")
    return "\n".join(lines)


def _check(link: str, as_json: bool, console: Console) -> int:
    found = checks.check(os.environ, link)
    if as_json:
        rows: list[dict[str, Any]] = [vars(fault) for fault in found]
        print(json.dumps({"link": link, "faults": rows}, indent=1))
    else:
        for fault in found:
            say(console, f"{'stops the job: ' if fault.stops else ''}{fault}")
        if not found:
            say(console, f"Nothing is wrong with the variables and XLA flags of this shell, for the link {link}.")
        say(console, f"`dhelix flags --link {link}` prints those that are usually fastest.")
    return int(bool(found))
