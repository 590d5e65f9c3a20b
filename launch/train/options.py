"""The options of `dhelix train` as data. This module imports nothing slow, because `dhelix train --help` needs it."""

from __future__ import annotations

import dataclasses
from typing import Any

from dhelix.runtime.step.options import StepOptions

SCHEDULES = ("cosine", "wsd", "linear", "constant")
"""How the learning rate falls (`optimizers.py`)."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Which model to train, and how. Each field except `step` has the name of its flag of `dhelix train`.

    A field that is None gets its value from the preset, or from the number of devices.

    Attributes:
      batch: number of sequences in one optimizer step: micro-batches x micro-batch size x dp (x ep with experts).
      step: how micro-batches are interleaved.
      init_from: folder of a checkpoint of Hugging Face, which gives the model and its weights in place of `preset`.
      optimizer, optimizer_options: an optimizer of Optax, and values for it: "b2=0.99,weight_decay=0.2".
      lr_end: the learning rate at the end of the schedule, as a fraction of `lr`.
      decay_steps: steps at the end over which the schedule `wsd` decays; None: a fifth of all.
      clip: largest global norm of the gradients; 0: any.
      z_loss: weight of the square of the log of the softmax's denominator.
      on_nan: what happens if a loss is not finite: "stop", or "skip" the step's update.
      mask_documents: whether a token attends to its own document alone; None: if there are several documents.
      eval_data: documents to evaluate on; None: a part of `data`, `eval_fraction`, if `eval_every` is given.
      eval_batches: number of batches of an evaluation.
      keep: number of the newest checkpoints that are kept.
      trace_steps: the steps that `trace` records, as "10-12"; None: the last one.
      resume_step: with `resume`: the step of the checkpoint to continue from; None: the newest.
      auto_resume: whether to resume if there is a checkpoint, and to start a new run else.
      export: folder for a checkpoint of Hugging Face.
      generate: text to which the model adds `generate_tokens` tokens at the end.
      compare_plain: whether ten steps are timed with passes and without.
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
    lr_schedule: str = "cosine"
    lr_end: float = 0.1
    warmup: int | None = None
    decay_steps: int | None = None
    optimizer: str = "adamw"
    optimizer_options: str | None = None
    clip: float = 1.0
    z_loss: float = 0.0
    param_dtype: str | None = None
    on_nan: str = "stop"
    seed: int = 0
    plain: bool = False
    step: StepOptions = StepOptions()
    data: str | None = None
    text_field: str = "text"
    tokenizer: str | None = None
    end_token: str | None = None
    token_cache: str | None = None
    mask_documents: bool | None = None
    eval_data: str | None = None
    eval_fraction: float = 0.05
    eval_every: int | None = None
    eval_batches: int = 8
    trace: str | None = None
    trace_steps: str | None = None
    tensorboard: str | None = None
    compare_plain: bool = False
    checkpoint_dir: str | None = None
    save_every: int | None = None
    keep: int = 3
    resume: bool = False
    resume_step: int | None = None
    auto_resume: bool = False
    init_from: str | None = None
    export: str | None = None
    generate: str | None = None
    generate_tokens: int = 64
    temperature: float = 0.0
    peak_tflops: float | None = None

    def said(self) -> dict[str, Any]:
        """All fields except `step`, as JSON values by name. `Options(**values)` makes equal options from them."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "step")
        return {name: getattr(self, name) for name in fields}
