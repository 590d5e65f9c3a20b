"""A train step with sharded states, described by its names and sizes. This module does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass

SEQUENCE = 4096
"""Tokens of a sequence. Each device has one sequence in a micro-batch."""


@dataclass(frozen=True)
class Case:
    """A step to compile.

    Attributes:
      model: name of a preset.
      gpus: number of data-parallel GPUs.
      strategy: how states are sharded, a name of `Factors.named`.
      microbatches: micro-batches of a step.
      sharding: "auto" or "shard_map", see `make_train_step`.
    """

    model: str
    gpus: int
    strategy: str
    microbatches: int
    sharding: str = "auto"
