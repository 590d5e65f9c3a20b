"""What to train and how, as data. Imports nothing heavy, because `dhelix train --help` needs it."""

from __future__ import annotations

import dataclasses
from typing import Any

from dhelix.runtime.step.options import StepOptions


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train and how; the flags of `dhelix train` by name.

    None leaves a choice to the preset, or to the number of devices.

    Attributes:
      batch: sequences of one optimizer step: micro-batches x micro-batch size x dp.
      step: how micro-batches are interleaved.
    """

    preset: str = "llama-demo"
    layers: int | None = None
    seq: int | None = None
    vocab: int | None = None
    dtype: str | None = None
    remat: str | None = None
    microbatches: int = 4
    mesh: str = ""
    pp: int = 1
    pipeline: str | None = None
    chunks_per_stage: int | None = None
    sends_beside: bool = False
    sharding: str = "shard_map"
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
        """All fields but `step`, as JSON values for `Options(**said)`."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "step")
        return {name: getattr(self, name) for name in fields}
