"""Trains a language model on text, for `dhelix train` and the demo.

The model's code does not depend on the passes, nor the passes on the model. `make_step` joins both: it gives the plain
train step to `jax.jit` or to `interleaved`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from dhelix.errors import DhelixError
from dhelix.launch.train import data
from dhelix.launch.train.checkpoint import CheckpointError, Checkpoints
from dhelix.launch.train.mesh_axes import mesh_axes
from dhelix.launch.train.options import Options
from dhelix.launch.train.pipelined import PipelinedTraining, make_pipelined_step
from dhelix.launch.train.sharded import ShardedTraining, states_of, with_states
from dhelix.models import (
    GptConfig,
    LlamaConfig,
    MoeConfig,
    Training,
    TrainState,
    make_mesh,
    make_train_step,
    preset,
)
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.passes.framework.report import Report
from dhelix.passes.sharding.factors import GROUPED
from dhelix.profiles import hardware
from dhelix.runtime.sharding.state_plan import StatePlan, data_axes
from dhelix.runtime.step import options as step_options
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.strand_interleave import interleaved

# A checkpoint's arrays and their meaning depend on these fields. Other fields may change when a run resumes. A
# configuration has the fields of all its types, and `sizes_of_ends`.
_MODEL_FIELDS = {
    DecoderConfig: (
        "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "norm_eps", "tie_embeddings", "param_dtype",
        "scan_layers",
    ),
    LlamaConfig: ("rope_theta", "rope_factor"),
    MoeConfig: ("experts", "chosen", "shared", "normalise"),
    GptConfig: ("positions", "rotary_dim", "rope_theta", "bias", "head_bias", "parallel_block", "activation"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of one optimizer step.

    Attributes:
      number: the step's number, counted from 1.
      loss: mean loss, in nats per token.
      seconds: how long the step took.
      metrics: the step's other metrics by name. For a model with experts, `dropped` is the fraction of the experts'
        choices that were dropped.
    """

    number: int
    loss: float
    grad_norm: float
    seconds: float
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        dropped = f", dropped {self.metrics['dropped']:.1%}" if "dropped" in self.metrics else ""
        return f"loss {self.loss:.4f}{dropped}"


@dataclasses.dataclass
class Run:
    """A training run: the train step, its state and its text.

    Attributes:
      batch: number of sequences per step.
      state: the train state; None until `start` makes or restores the state.
      first: number of steps that were taken before this run.
    """

    options: Options
    training: Training
    corpus: data.Corpus
    batch: int
    step: Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]
    state: Any = None
    first: int = 0

    @property
    def seq(self) -> int:
        return self.training.config.seq

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    def tokens(self, number: int) -> dict[str, jax.Array]:
        """The batch of step `number`, counted from 0."""
        sharding = self.training.batch_sharding
        return self.corpus.sharded_batch(number, self.batch, self.seq, sharding, self.options.seed)

    def report(self) -> Report | None:
        """The report of the passes; None for a plain run."""
        if self.options.plain:
            return None
        return self.step.report(self.training.abstract_state(), self.training.abstract_batch(self.batch))  # type: ignore

    def take_steps(self) -> Iterator[Step]:
        """Takes the remaining steps one by one and yields their results. Raises DhelixError if a loss is not finite."""
        for number in range(self.first, self.options.steps):
            tokens = self.tokens(number)
            begun = time.perf_counter()
            with self._recorded(number):
                self.state, metrics = self.step(self.state, tokens)
                others = {name: float(value) for name, value in metrics.items()}
                loss, grad_norm = others.pop("loss"), others.pop("grad_norm")
            if not math.isfinite(loss):
                raise DhelixError(f"the loss of step {number + 1} is {loss}; use a smaller --lr than {self.options.lr}")
            yield Step(number + 1, loss, grad_norm, time.perf_counter() - begun, others)

    def _recorded(self, number: int) -> contextlib.AbstractContextManager[object]:
        """A context that records a profiler trace if `trace` is set and step `number` is the last one."""
        if self.options.trace is None or number + 1 < self.options.steps:
            return contextlib.nullcontext()
        return jax.profiler.trace(self.options.trace)


def prepare(options: Options) -> Run:
    """Makes a run without its state. Raises DhelixError if the options contradict each other or need other devices."""
    config = configuration(options)
    if config.vocab < data.VOCABULARY:
        raise DhelixError(
            f"the model has {config.vocab} tokens, but bytes need {data.VOCABULARY}; give --vocab {data.VOCABULARY}"
        )
    corpus = data.load(options.data)
    corpus.check(config.seq)
    training, batch = make_training(options, config, jax.devices())
    return Run(options, training, corpus, batch, make_step(training, options.plain, options.step))


def configuration(options: Options) -> DecoderConfig:
    """The configuration of the model. Raises DhelixError if the options contradict each other."""
    given = _given(seq=options.seq, vocab=options.vocab, dtype=options.dtype, remat=options.remat)
    if options.unrolled and options.pp > 1:
        raise DhelixError("--pp needs stacked layers; leave --unrolled out")
    given |= {"scan_layers": False} if options.unrolled else {}
    if options.capacity is not None:
        if not isinstance(preset(options.preset), MoeConfig):
            raise DhelixError(f"--capacity is for models with experts, and {options.preset} has none; leave it out")
        given["capacity_factor"] = options.capacity
    return _valid(lambda: preset(options.preset, options.layers, **given))


def make_training(options: Options, config: DecoderConfig, devices: Sequence[Any]) -> tuple[Training, int]:
    """The plain train step and its batch size in sequences. The mesh takes as many of `devices` as it needs.

    Raises:
      DhelixError: the options contradict each other or need other devices.
    """
    experts = config.experts if isinstance(config, MoeConfig) else 0
    axes = mesh_axes(options.mesh, len(devices), config.kv_heads, options.pp, experts)
    data, states = _states(options, axes["dp"])
    mesh = _valid(lambda: make_mesh(data, axes["tp"], devices, options.pp, axes.get("ep"), axes["cp"]))
    training = _valid(lambda: _training(options, config, mesh))
    if states is not None:
        training = with_states(training, states)
    batch = options.batch or options.microbatches * axes["dp"] * axes.get("ep", 1)
    _valid(lambda: training.check_batch(training.abstract_batch(batch)))
    if isinstance(config, MoeConfig):
        tokens = batch // options.microbatches * config.seq // (axes["dp"] * axes["ep"] * axes["cp"] * axes["tp"])
        _valid(lambda: config.capacity(tokens))
    return training, batch


def _states(options: Options, dp: int) -> tuple[dict[str, int], StatePlan | None]:
    """The axes into which `--states` or `--plan` splits the `dp` data-parallel devices, and the plan, if any."""
    states = states_of(options.states, options.step.plan)
    if states is None:
        if options.states_group is not None:
            raise DhelixError("--states_group needs --states; say how model states are sharded, such as zero1")
        return {"dp": dp}, None
    said = [states.factors, *(one for _, one in states.groups)] if isinstance(states, StatePlan) else [states]
    if options.states_group is None and any(one in GROUPED for one in said if isinstance(one, str)):
        raise DhelixError(
            f"--states {options.states} needs --states_group, the number of devices of dp that hold one copy"
        )
    return data_axes(states, dp, options.states_group)


def _training(options: Options, config: DecoderConfig, mesh: Mesh) -> Training:
    if options.context is not None and "cp" not in mesh.axis_names:
        raise DhelixError("--context needs context parallelism; give --mesh a cp of at least 2, or leave it out")
    shared: dict[str, Any] = {"sharding": options.sharding, "context": options.context or "ring"}
    if options.pp == 1:
        given = {
            "pipeline": options.pipeline is not None,
            "chunks_per_stage": options.chunks_per_stage is not None,
            "sends_beside": options.sends_beside,
        }
        for name in (name for name, needless in given.items() if needless):
            raise DhelixError(f"--{name} needs --pp; give the number of stages")
        return make_train_step(config, mesh, optimizer(options), options.microbatches, **shared)
    return make_pipelined_step(
        config, mesh, optimizer(options), options.microbatches, options.pipeline or "w", options.chunks_per_stage or 2,
        sends_beside=options.sends_beside, **shared,
    )  # fmt: skip


def make_step(training: Training, plain: bool, options: StepOptions | None = None) -> Any:
    """The train step that a run calls. It is under `jax.jit` if `plain`, else interleaved. It donates the state.

    Pipelines and steps with sharded states are always made by `interleaved`, because `jax.jit` alone would not run them
    as planned. If such a step is `plain`, no passes run, and XLA chooses the order of operators.

    Raises:
      DhelixError: an option is invalid. For example, the file in `plan` is no plan.
    """
    options = options or StepOptions()
    if isinstance(training, ShardedTraining):
        options = options.but(sharding=training.states, passes=() if plain else options.passes)
    elif plain:
        return jax.jit(training.train_step, donate_argnums=0)
    if isinstance(training, PipelinedTraining):
        options = options.but(microbatches=training.microbatches, pipeline=training.fold)
    return interleaved(training.train_step, options.but(donate_argnums=0))


def optimizer(options: Options) -> optax.GradientTransformation:
    """AdamW with gradient clipping. The learning rate warms up linearly, then decays by a cosine to `lr` / 10."""
    warmup = options.warmup if options.warmup is not None else min(100, max(1, options.steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.lr, warmup, max(options.steps, warmup + 1), 0.1 * options.lr
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))


def start(run: Run, checkpoints: Checkpoints | None = None) -> None:
    """Gives `run` its state: a new one, or, with the option `resume`, the state of the newest checkpoint.

    Raises:
      DhelixError: the checkpoints in the folder do not fit the options.
    """
    if checkpoints is None:
        run.state = run.training.init(jax.random.key(run.options.seed))
        return
    latest = checkpoints.latest_step
    if run.options.resume:
        run.first, run.state = _restore(run, checkpoints)
        if run.first >= run.options.steps:
            raise DhelixError(f"{checkpoints.folder} already holds step {run.first}; give a larger --steps to continue")
    elif latest is not None:
        raise DhelixError(
            f"{checkpoints.folder} holds checkpoints up to step {latest}; give --resume to continue from there, or "
            "another --checkpoint_dir"
        )
    else:
        run.state = run.training.init(jax.random.key(run.options.seed))


def _restore(run: Run, checkpoints: Checkpoints) -> tuple[int, Any]:
    """The step and the state of the newest checkpoint.

    Raises:
      DhelixError: the checkpoint belongs to another preset; the message names both presets.
      CheckpointError: see `Checkpoints.restore`.
    """
    try:
        step, stored = checkpoints.restore(run.training.to_model_order(run.training.abstract_state()))
        return step, run.training.from_model_order(stored)
    except CheckpointError as error:
        latest = checkpoints.latest_step
        stored = None if latest is None else checkpoints.notes(latest).get("preset")
        if stored in (None, run.options.preset):
            raise
        raise DhelixError(
            f"{checkpoints.folder} holds checkpoints of {stored}, but this run trains {run.options.preset}; give "
            f"--preset {stored}, or another --checkpoint_dir"
        ) from error


def train(
    run: Run,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[list[Step]], None] = lambda steps: None,
) -> list[Step]:
    """Takes the remaining steps. Saves a checkpoint every `save_every` steps and at the end.

    Args:
      on_step: called after each step with the results of all steps so far.

    Returns:
      The results of all steps.
    """
    options, steps = run.options, []
    for step in run.take_steps():
        steps.append(step)
        on_step(steps)
        due = options.save_every is not None and step.number % options.save_every == 0
        if checkpoints is not None and (due or step.number == options.steps):
            checkpoints.save(step.number, run.training.to_model_order(run.state))
    return steps


def step_seconds(steps: list[Step]) -> float:
    """The median step time. The first step does not count unless it is the only one, because it compiles."""
    return statistics.median(step.seconds for step in steps[1:] or steps)


def utilization(run: Run, seconds: float) -> float | None:
    """MFU of a step that takes `seconds`: the model's FLOPs divided by the peak FLOPs of all devices in that time.

    Attention counts in full, not halved for the causal mask. The result is None if the peak of the devices is unknown
    and `peak_tflops` is not set.
    """
    peak = run.options.peak_tflops and run.options.peak_tflops * 1e12
    kind = run.training.mesh.devices.flat[0].device_kind
    known = hardware.ALL.get(hardware.gpu_name(kind))
    peak = peak or (known and known.peak_flops)
    if not peak:
        return None
    flops = run.training.config.flops_per_token(run.seq) * run.tokens_per_step
    return flops / (seconds * peak * run.training.mesh.size)


def speed(run: Run, steps: list[Step]) -> tuple[str, ...]:
    """Tokens per second and MFU of the latest 20 steps, in words. MFU is left out if it is unknown."""
    seconds = step_seconds(steps[-20:] if len(steps) > 20 else steps)
    mfu = utilization(run, seconds)
    return f"{run.tokens_per_step / seconds:,.0f} tokens/s", *([] if mfu is None else [f"MFU {mfu:.1%}"])


def results(run: Run, steps: list[Step]) -> dict[str, Any]:
    """All results of a run as JSON values. The time of the first step includes the compilation."""
    seconds = step_seconds(steps)
    report = run.report()
    return {
        "options": _said(run.options),
        "model": dataclasses.asdict(run.training.config),
        "parameters": run.training.config.parameter_count,
        "devices": run.training.mesh.devices.flat[0].device_kind,
        "mesh": dict(run.training.mesh.shape),
        "data": {"name": run.corpus.name, "bytes": len(run.corpus.tokens)},
        "tokens_per_step": run.tokens_per_step,
        "steps": [dataclasses.asdict(step) for step in steps],
        "step_seconds": seconds,
        "tokens_per_second": run.tokens_per_step / seconds,
        "mfu": utilization(run, seconds),
        "passes": None if report is None else json.loads(report.to_json()),
    }


def _said(options: Options) -> dict[str, Any]:
    """All options as JSON values, by the names of their flags."""
    return options.said() | {name: getattr(options.step, name) for name in step_options.flags()}


def identity(run: Run) -> dict[str, Any]:
    """The part of the configuration that must be equal in a checkpoint and in the run that resumes from it."""
    config = run.training.config
    fields = [name for kind, names in _MODEL_FIELDS.items() if isinstance(config, kind) for name in names]
    return {"model": {name: getattr(config, name) for name in (*config.sizes_of_ends, *fields)}}


def notes(run: Run) -> dict[str, Any]:
    """Values that a checkpoint stores only so that messages can name them."""
    return {"preset": run.options.preset, **batch_notes(run)}


def batch_notes(run: Run) -> dict[str, Any]:
    """The values that determine the batches. If a value has changed when a run resumes, the user gets a note."""
    return {"data": run.corpus.fingerprint, "batch": run.batch, "seq": run.seq, "seed": run.options.seed}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _valid(make: Callable[[], Any]) -> Any:
    """The result of `make()`. A ValueError of the models becomes a DhelixError with the same message."""
    try:
        return make()
    except ValueError as error:
        raise DhelixError(str(error)) from error
