"""Checks the environment variables and XLA flags of a job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dhelix.profiles.launching.reasons import RENAMED, WARNED, Warned

_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: (.*)")
_LOOKS = "import jax; jax.devices('cpu')"
"""A program that reads XLA_FLAGS, and ends at once if it has an unknown flag."""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong.

    Attributes:
      name: the variable or flag.
      why: what is wrong, and what to do.
      stops: whether the job does not start because of it.
    """

    name: str
    why: str
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def xla_flags(text: str) -> dict[str, str]:
    """The flags in a value of XLA_FLAGS, by name without dashes. A flag without a value is true."""
    found = {}
    for word in text.split():
        name, equals, value = word.lstrip("-").partition("=")
        found[name] = value if equals else "true"
    return found


def check(environment: Mapping[str, str], link: str) -> list[Fault]:
    """What is wrong with the variables and XLA flags of a job, what stops it first."""
    flags = xla_flags(environment.get("XLA_FLAGS", ""))
    has = {**environment, **flags}
    faults = [Fault(f"--{name}", _unknown_words(name), stops=True) for name in unknown(environment)]
    words = environment.get("XLA_FLAGS", "").split()
    names = [word.lstrip("-").partition("=")[0] for word in words]
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        faults.append(Fault(f"--{name}", f"it is given {names.count(name)} times; the last one counts"))
    faults += [Fault(_spelled(one.name, has), one.why) for one in WARNED if _applies(one, has, link)]
    return faults


def unknown(environment: Mapping[str, str]) -> list[str]:
    """The names of flags in XLA_FLAGS that the installed jaxlib does not know. A process of its own reads them."""
    if not environment.get("XLA_FLAGS", "").strip():
        return []
    tried = {**os.environ, **environment, "JAX_PLATFORMS": "cpu"}
    tried.pop("DHELIX_AUTO", None)
    done = subprocess.run([sys.executable, "-c", _LOOKS], env=tried, capture_output=True, text=True, check=False)
    found = _UNKNOWN.search(done.stderr)
    return list(xla_flags(found.group(1))) if found else []


def _applies(one: Warned, has: Mapping[str, str], link: str) -> bool:
    value = has.get(one.name)
    if value is None or (one.values and value.strip().lower() not in {v.lower() for v in one.values}):
        return False
    if one.link and one.link != link:
        return False
    name, _, right = one.unless.partition("=")
    return not (name and has.get(name, "").lower() == right)


def _spelled(name: str, has: Mapping[str, str]) -> str:
    return f"--{name}={has[name]}" if name.startswith("xla_") else f"{name}={has[name]}"


def _unknown_words(name: str) -> str:
    return RENAMED.get(name, "this jaxlib does not know it, and stops; remove it")
