"""The options of `dhelix train` as data. This module imports nothing slow, because `dhelix train --help` needs it."""

from __future__ import annotations

import dataclasses
from typing import Any

from dhelix.runtime.step.options import StepOptions


@dataclasses.dataclass(frozen=True)
class Options:
    """Which model to train, and how. Each field except `step` has the name of its flag of `dhelix train`.

    A field that is None gets its value from the preset, or from the number of devices.

    Attributes:
      batch: number of sequences in one optimizer step: micro-batches x micro-batch size x dp (x ep with experts).
      step: how micro-batches are interleaved.
    """

    preset: str = "llama-demo"
    layers: int | None = None
    seq: int | None = None
    vocab: int | None = None
    dtype: str | None = None
    remat: str | None = None
    unrolled: bool = False
    capacity: float | None = None
    microbatches: int = 4
    mesh: str = ""
    context: str | None = None
    pp: int = 1
    pipeline: str | None = None
    chunks_per_stage: int | None = None
    sends_beside: bool = False
    sharding: str = "shard_map"
    states: str | None = None
    states_group: int | None = None
    batch: int | None = None
    steps: int = 50
    lr: float = 1e-3
    warmup: int | None = None
    seed: int = 0
    plain: bool = False
    step: StepOptions = StepOptions()
    data: str | None = None
    trace: str | None = None
    checkpoint_dir: str | None = None
    save_every: int | None = None
    resume: bool = False
    peak_tflops: float | None = None

    def said(self) -> dict[str, Any]:
        """All fields except `step`, as JSON values by name. `Options(**values)` makes equal options from them."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "step")
        return {name: getattr(self, name) for name in fields}
