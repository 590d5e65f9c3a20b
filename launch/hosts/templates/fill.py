"""Fills job files: `dhelix launch --template slurm --nodes 4 train.py --steps 100`. This module does not import jax."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from dhelix.errors import DhelixError

NAMES = {"slurm": "slurm.sh", "jobset": "jobset.yaml", "dockerfile": "dockerfile.txt"}
_FOLDER = Path(__file__).parent
_USUAL_PROGRAM = ("train.py",)
_LABEL = r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?"  # a name in DNS, with room for the names of pods
_TIME = r"(\d+-)?\d+(:\d+){0,2}"
_IMAGE = r"[\w./:@-]+"


def template(chosen: Mapping[str, Any], program: Sequence[str]) -> str:
    """The job file that the flags describe, for a program with its arguments.

    Raises DhelixError if a flag is no value that the scheduler takes.
    """
    program = list(program) or list(_USUAL_PROGRAM)
    image = chosen["image"] or f"{chosen['name']}:latest"
    _check("name", chosen["name"], _LABEL, "a name of small letters, digits and dashes, of at most 42 characters")
    _check("time", chosen["time"], _TIME, "a time as Slurm writes it, such as 24:00:00 or 2-00")
    _check("image", image, _IMAGE, "a container image, such as registry.example/train:1")
    heartbeat = str(chosen["heartbeat"])
    return Template((_FOLDER / NAMES[chosen["template"]]).read_text()).substitute(
        {name: chosen[name] for name in ("name", "nodes", "gpus_per_node", "time", "heartbeat")},
        image=image,
        program=shlex.join(program),
        command=json.dumps(["dhelix", "launch", "--heartbeat", heartbeat, *program]),
        arguments=json.dumps(program),
        version=_version(),
    )


def _check(flag: str, value: str, pattern: str, what: str) -> None:
    if not re.fullmatch(pattern, value):
        raise DhelixError(f"--{flag} {value!r}: give {what}")


def _version() -> str:
    try:
        return importlib.metadata.version("dhelix")
    except importlib.metadata.PackageNotFoundError:
        return "0.1.0"
