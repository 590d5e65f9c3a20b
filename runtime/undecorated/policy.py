"""What `dhelix run` may change, and how: options, lists of names, and where the report goes.

    policy = Policy(only=("train_step",), options={"schedule": "list"}, functions={"train_step": {"skew": 1}})
    os.environ[VARIABLE] = policy.dumps()      # for this process and the ones that it starts
    policy.of("jit_train_step")                # {"schedule": "list", "skew": 1}

Names are those of jitted functions, without JAX's `jit_`, and may be patterns as of a shell (`train_*`). This module
does not import jax.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.runtime.step import options as step_options

VARIABLE = "DHELIX_AUTO"
"""The environment variable that holds a policy."""

_PREFIX = "jit_"


@dataclass(frozen=True)
class Policy:
    """What may be changed.

    Attributes:
      only: patterns of names; only matching functions are changed. Empty: all.
      skip: patterns of names of functions that are left alone.
      options: options of `strand_interleave` for all functions.
      functions: further options by pattern. Later patterns override earlier ones.
      report: file for the report as JSON; "" for none.
      quiet: whether nothing is printed at the end.
      process: the process that reports even if it compiled no step; 0: none. Others, such as those that load data, then
        say nothing.

    Raises:
      DhelixError: an option is unknown, or neither `disable` nor one that has a flag.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    report: str = ""
    quiet: bool = False
    process: int = 0

    def __post_init__(self) -> None:
        # verify compares two calls, and only a decorator sees calls.
        known = step_options.flags().keys() - {"verify"} | {"disable"}
        for place, given in {"": self.options, **self.functions}.items():
            if not isinstance(given, Mapping):
                raise DhelixError(f"options of {place!r} are a table of names and values, not {given!r}")
            for name in given.keys() - known:
                where = f" of {place!r}" if place else ""
                raise DhelixError(f"{name!r}{where} is no option for undecorated steps: use {', '.join(sorted(known))}")

    def allows(self, name: str) -> bool:
        """Whether the program of this name may be changed."""
        name = name.removeprefix(_PREFIX)
        allowed = not self.only or any(fnmatchcase(name, pattern) for pattern in self.only)
        return allowed and not any(fnmatchcase(name, pattern) for pattern in self.skip)

    def of(self, name: str) -> dict[str, Any]:
        """The options for the program of this name."""
        found = dict(self.options)
        for pattern, given in self.functions.items():
            if fnmatchcase(name.removeprefix(_PREFIX), pattern):
                found |= given
        return found

    def dumps(self) -> str:
        return json.dumps(asdict(self))


def loads(text: str) -> Policy:
    """The policy in a text of `Policy.dumps`. An empty text, or 1, is the default policy.

    Raises:
      DhelixError: the text is no policy.
    """
    if text.strip() in ("", "1"):
        return Policy()
    try:
        found = json.loads(text)
        return Policy(**{**found, "only": tuple(found.get("only", ())), "skip": tuple(found.get("skip", ()))})
    except (ValueError, TypeError, AttributeError) as error:
        raise DhelixError(f"{VARIABLE} holds no policy of `dhelix run` ({error}): unset it, or set it to 1") from None


def of_file(path: str) -> Mapping[str, Any]:
    """The fields of a policy in a TOML file.

        only = ["train_*"]
        [options]
        schedule = "list"
        [functions.train_step]
        skew = 1

    Raises:
      DhelixError: the file cannot be read, or has unknown fields.
    """
    try:
        found = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise DhelixError(f"{path}: cannot be read ({error.strerror}): check the path of --options") from None
    except ValueError as error:
        raise DhelixError(f"{path}: no TOML file ({error})") from None
    known = {one.name for one in fields(Policy)} - {"report", "quiet", "process"}
    for name in found.keys() - known:
        raise DhelixError(f"{path}: {name!r} is unknown; it may have {', '.join(sorted(known))}")
    for name in ("only", "skip"):
        if name in found and not (isinstance(found[name], list) and all(isinstance(one, str) for one in found[name])):
            raise DhelixError(f'{path}: {name} is a list of names, such as ["train_*"]')
    return found
