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
_OF_THE_JOB = ("processes", "coordinator", "num_processes", "process_id")
_LABEL = r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?"  # a name in DNS, with room for the names of pods
_TIME = r"(\d+-)?\d+(:\d+){0,2}"
_IMAGE = r"[\w./:@-]+"


def template(chosen: Mapping[str, Any], program: Sequence[str]) -> str:
    """The job file that the flags describe, for a program with its arguments.

    Raises DhelixError if a flag is no value that the scheduler takes.
    """
    for flag in _OF_THE_JOB:
        if chosen[flag] is not None:
            raise DhelixError(f"--template: the scheduler says how many processes there are; leave out --{flag}")
    program = list(program) or list(_USUAL_PROGRAM)
    command = ["dhelix", "launch", *_flags(chosen)]
    image = chosen["image"] or f"{chosen['name']}:latest"
    _check("name", chosen["name"], _LABEL, "a letter, then small letters, digits and dashes, 42 at most")
    _check("time", chosen["time"], _TIME, "a time as Slurm writes it, such as 24:00:00 or 2-00")
    _check("image", image, _IMAGE, "a container image, such as registry.example/train:1")
    in_shell = shlex.join(command) + (' --logs "logs/${SLURM_JOB_ID}"' if chosen["logs"] is None else "")
    return Template((_FOLDER / NAMES[chosen["template"]]).read_text()).substitute(
        {name: chosen[name] for name in ("name", "nodes", "gpus_per_node", "time")},
        image=image,
        in_shell=in_shell,
        program=shlex.join(program),
        whole=_json([word.replace("$", "$$") for word in command + program]),  # Kubernetes reads $(NAME), and $$ as $
        command=_json(command),
        arguments=_json(program),
        version=_version(),
    )


def _check(flag: str, value: str, pattern: str, what: str) -> None:
    if not re.fullmatch(pattern, value):
        raise DhelixError(f"--{flag} {value!r}: give {what}")


def _flags(chosen: Mapping[str, Any]) -> list[str]:
    """The flags that `dhelix launch` has in the job."""
    words = ["--heartbeat", str(chosen["heartbeat"])]
    words += [f"--no{name}" for name in ("check", "interleave") if not chosen[name]]
    words += ["--verbose"] if chosen["verbose"] else []
    for name in ("log", "logs", "options", "cpu_devices"):
        words += [] if chosen[name] is None else [f"--{name}", str(chosen[name])]
    return words + (["--mesh", ",".join(chosen["mesh"])] if chosen["mesh"] else [])


def _json(words: Sequence[str]) -> str:
    return json.dumps(words, ensure_ascii=False)


def _version() -> str:
    try:
        return importlib.metadata.version("dhelix")
    except importlib.metadata.PackageNotFoundError:
        return "0.1.0"
