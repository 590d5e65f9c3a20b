"""The plain step as XLA schedules it: the memory that it needs, and the time that it is predicted to take.

A step is compared with it: what it may need (`memory_need.py`) and what it gains (`passes/gain.py`). To know both takes
XLA's passes over the plain step, seconds for large ones, so they are kept beside the compilation cache.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from absl import logging

from dhelix.passes import fingerprint
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.gain import StepParts
from dhelix.passes.hlo import HloModule
from dhelix.runtime import broken_off, lowering, memory_need
from dhelix.runtime.memory_need import MemoryNeed

type Pricing = Callable[[], tuple[Costs, str]]
"""Costs, and whose they are, in words."""


@dataclass(frozen=True)
class Known:
    """What is known of a plain step: bytes that it needs, and how its time is made up."""

    need: MemoryNeed
    parts: StepParts


class PlainStep:
    """A lowered step before any pass; what is to be known of it is found out when it is asked for.

    Attributes:
      seconds: that finding out has taken, in this process.
    """

    def __init__(self, lowered: jax.stages.Lowered, pricing: Pricing, options: Mapping[str, Any] | None = None):
        """
        Args:
          lowered: for GPUs.
          pricing: whose costs the time follows from.
          options: XLA's, that the step is compiled with.
        """
        self._lowered = lowered
        self._pricing = pricing
        self._options = dict(options or {})
        self.seconds = 0.0

    @cached_property
    def known(self) -> Known | None:
        """None where XLA does not come to a schedule; whoever compiles the program hears why."""
        start = time.perf_counter()
        try:
            costs, words = self._pricing()
            path = self._path(words)
            found = _read(path)
            if found is None:
                found = self._found(costs, words)
                _write(path, found)
            return found
        finally:
            self.seconds = time.perf_counter() - start

    def _found(self, costs: Costs, words: str) -> Known | None:
        module = broken_off.scheduled(self._lowered, lowering.hlo_bytes(self._lowered), "memory")
        if module is None:
            return None
        scheduled = HloModule.from_bytes(module)
        return Known(memory_need.of_module(scheduled), step_parts(scheduled, costs, words))

    def _path(self, words: str) -> Path | None:
        """Of the file that holds it: named by the program, XLA's options, and whose costs count."""
        folder = jax.config.jax_compilation_cache_dir
        if not folder or "://" in str(folder):
            return None
        given = {"flags": os.environ.get("XLA_FLAGS", ""), "options": {k: str(v) for k, v in self._options.items()}}
        program = lowering.hlo_bytes(self._lowered)
        name = fingerprint.input_fingerprint((), program, {**given, "costs": words})
        return Path(folder) / "dhelix" / f"plain_{name}.json"


def _read(path: Path | None) -> Known | None:
    """What lies there. Others write to the folder, too: what is damaged counts as missing."""
    try:
        if path is None or not path.is_file():
            return None
        data = json.loads(path.read_text())
        return Known(MemoryNeed(**data["need"]), StepParts(**data["parts"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        logging.vlog(1, "%s is left out: %s", path, error)
        return None


def _write(path: Path | None, known: Known | None) -> None:
    """Whole or not at all."""
    if path is None or known is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(dataclasses.asdict(known), file)
        os.replace(file.name, path)
    except OSError as error:
        logging.vlog(1, "cannot store %s: %s", path, error)
