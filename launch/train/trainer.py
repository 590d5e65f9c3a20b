"""Trains a language model on text, for `dhelix train` and the demo.

The model's code does not depend on the passes, nor the passes on the model. `make_step` joins both: it gives the plain
train step to `jax.jit` or to `interleaved`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dhelix.errors import DhelixError
from dhelix.launch.train import loop
from dhelix.launch.train.data import sources, token_files, tokenizers
from dhelix.launch.train.data.batches import Batches
from dhelix.launch.train.data.documents import Documents, check_vocabulary
from dhelix.launch.train.data.rows import Rows
from dhelix.launch.train.evaluation import documents_of, make_evaluation
from dhelix.launch.train.generation import prompt_of
from dhelix.launch.train.loop import Run
from dhelix.launch.train.meshes.mesh_axes import mesh_axes
from dhelix.launch.train.meshes.pipelined import PipelinedTraining, make_pipelined_step
from dhelix.launch.train.meshes.sharded import ShardedTraining, states_of, with_states
from dhelix.launch.train.optimizers import optimizer
from dhelix.launch.train.options import Options
from dhelix.launch.train.saved import notes, weights
from dhelix.launch.train.saved.checkpoint import CheckpointError, Checkpoints
from dhelix.models import (
    GptConfig,
    LlamaConfig,
    MoeConfig,
    Training,
    make_mesh,
    make_train_step,
    preset,
)
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.passes.sharding.factors import GROUPED
from dhelix.runtime.sharding.state_plan import StatePlan, data_axes
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
    MoeConfig: (
        "experts", "chosen", "shared", "normalise", "norm", "attention_bias", "head_bias", "routing", "long_rope",
    ),
    GptConfig: ("positions", "rotary_dim", "rope_theta", "bias", "head_bias", "parallel_block", "activation"),
}  # fmt: skip


def prepare(options: Options, say: Callable[[str], None] = lambda text: None) -> Run:
    """Makes a run without its state.

    Args:
      say: called with a line of text about long work.

    Raises:
      DhelixError: the options contradict each other or need other devices, or the data does not fit the model.
    """
    config = configuration(options)
    documents, others = _documents(options, config, say)
    training, batch = make_training(options, config, jax.devices())
    if config.dtype == "float16" and jax.default_backend() == "cpu":
        raise DhelixError("CPU devices do not compute in float16; give --dtype float32 or bfloat16")
    _say_padding(options, training, say)
    if options.warmup is not None and options.warmup > options.steps:
        say(f"note: --warmup {options.warmup} is longer than --steps {options.steps}, so --lr is never reached")
    masked = options.mask_documents if options.mask_documents is not None else len(documents) > 1
    rows = Rows(documents, config.seq, masked, config.vocab)
    run = Run(
        options, training, Batches(rows, batch, training.batch_sharding, options.seed),
        make_step(training, options.plain, options.step),
    )  # fmt: skip
    if others is not None:
        evaluated, _ = make_training(options, dataclasses.replace(config, z_loss=0.0), jax.devices())
        run.evaluate = make_evaluation(options, evaluated, dataclasses.replace(rows, documents=others), batch)
    if options.compare_plain:
        run.plain_step = make_step(training, plain=True)
    return run


def _say_padding(options: Options, training: Training, say: Callable[[str], None]) -> None:
    """Says if the optimizer averages over layers and the pipeline pads its chunks with layers of zeros."""
    if options.optimizer != "adafactor" or not isinstance(training, PipelinedTraining):
        return
    layers, layout = training.config.layers, training.fold.layout(training.config.layers)
    if (places := layout.chunks * layout.padded) > layers:
        say(
            f"note: adafactor averages over layers, and {places - layers} of {places} places of the pipeline are "
            "padding, so losses differ a little from those without them"
        )


def _documents(
    options: Options, config: DecoderConfig, say: Callable[[str], None]
) -> tuple[Documents, Documents | None]:
    """The documents to train on and to evaluate on, as the options name them."""
    tokenizer = tokenizers.load(weights.tokenizer_of(options), options.end_token)
    of_tokens = options.data is not None and token_files.is_one(Path(options.data))
    if options.generate is not None:
        prompt_of(tokenizer, options.generate, config.seq)  # an error comes before the training
    if tokenizer.end is None and not of_tokens:
        say(f"{tokenizer.name} has no end of text, so nothing stands behind documents; --end_token names a token")
    if options.tokenizer is not None or not of_tokens:
        check_vocabulary(tokenizer.name, tokenizer.vocabulary, config.vocab)
    given = options.text_field, options.token_cache, say
    documents = sources.load(options.data, tokenizer, *given)
    other = None if options.eval_data is None else sources.load(options.eval_data, tokenizer, *given)
    documents, other = documents_of(options, documents, other)
    if other is not None:
        say(f"evaluation: {other.name}, {len(other):,} document{'s' * (len(other) > 1)}, {other.size:,} tokens")
    documents.check(config.seq, config.vocab, purpose="" if other is None else " for training")
    if other is not None:
        other.check(config.seq, config.vocab, "data" if options.eval_data is None else "eval_data", " for evaluation")
    return documents, other


def configuration(options: Options) -> DecoderConfig:
    """The configuration of the model. Raises DhelixError if the options contradict each other."""
    given = _given(
        seq=options.seq, vocab=options.vocab, dtype=options.dtype, remat=options.remat, param_dtype=options.param_dtype
    )
    given |= {"z_loss": options.z_loss} if options.z_loss else {}
    if options.init_from is not None:
        return _from_checkpoint(options, given)
    if options.unrolled and options.pp > 1:
        raise DhelixError("--pp needs stacked layers; leave --unrolled out")
    given |= {"scan_layers": False} if options.unrolled else {}
    if options.capacity is not None:
        if not isinstance(preset(options.preset), MoeConfig):
            raise DhelixError(f"--capacity is for models with experts, and {options.preset} has none; leave it out")
        given["capacity_factor"] = options.capacity
    return _valid(lambda: preset(options.preset, options.layers, **given))


def _from_checkpoint(options: Options, given: dict[str, Any]) -> DecoderConfig:
    for name in ("layers", "vocab"):
        if getattr(options, name) is not None:
            raise DhelixError(f"--init_from takes the model of the checkpoint as it is; leave --{name} out")
    if options.unrolled:
        given["scan_layers"] = False
    if options.capacity is not None:
        given["capacity_factor"] = options.capacity
    return weights.configuration(str(options.init_from), **given)


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


def start(run: Run, checkpoints: Checkpoints | None = None, say: Callable[[str], None] = lambda text: None) -> None:
    """Gives `run` its state: a new one, or, if it resumes, the state of a checkpoint.

    Args:
      say: called with a line of text about what is resumed.

    Raises:
      DhelixError: the checkpoints in the folder do not fit the options.
    """
    latest = None if checkpoints is None else checkpoints.latest_step
    if checkpoints is not None and (run.options.resume or (run.options.auto_resume and latest is not None)):
        _resume(run, checkpoints, say)
    elif checkpoints is not None and latest is not None:
        raise DhelixError(
            f"{checkpoints.folder} holds checkpoints up to step {latest}; give --resume to continue from there, or "
            "another --checkpoint_dir"
        )
    else:
        run.state = run.training.init(jax.random.key(run.options.seed))
        if run.options.init_from is not None:
            weights.load(run)


def _resume(run: Run, checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
    """Gives `run` the state of a checkpoint, and says what differs. Newer checkpoints are set aside."""
    options, step = run.options, checkpoints.chosen(run.options.resume_step)
    stored = checkpoints.notes(step)
    notes.check_optimizer(stored, run, checkpoints.name(step))
    run.state = _restored(run, checkpoints, step, stored)
    run.first, run.first_row = step, int(stored.get("rows") or step * int(stored.get("batch") or run.batch))
    ends = step >= options.steps
    if ends and options.export is None and options.generate is None:
        raise DhelixError(f"{checkpoints.folder} already holds step {step}; give a larger --steps to continue")
    say(f"resumed from step {step} in {checkpoints.folder}")
    for change in notes.changes(stored, run):
        say(f"note: {change}")
    if options.trace is not None and (lost := loop.untraceable(run)) is not None:
        if options.resume:
            raise DhelixError(lost)
        say(f"note: {lost}; this run writes no trace")  # a scheduler gives the same command again and again
        run.options = dataclasses.replace(options, trace=None, trace_steps=None)
    if not ends and (moved := checkpoints.set_aside(step)) is not None:
        say(moved)


def _restored(run: Run, checkpoints: Checkpoints, step: int, stored: Mapping[str, Any]) -> Any:
    """The state of the checkpoint of a step.

    Raises:
      DhelixError: the checkpoint belongs to another preset; the message names both presets.
      CheckpointError: it is of another optimizer, or see `Checkpoints.restore`.
    """
    try:
        abstract = run.training.to_model_order(run.training.abstract_state())
        return run.training.from_checkpoint(checkpoints.restore(abstract, step)[1])
    except CheckpointError as error:
        preset = stored.get("preset")
        if preset in (None, run.options.preset):
            raise
        raise DhelixError(
            f"{checkpoints.folder} holds checkpoints of {preset}, but this run trains {run.options.preset}; give "
            f"--preset {preset}, or another --checkpoint_dir"
        ) from error


def identity(run: Run) -> dict[str, Any]:
    """The part of the configuration that must be equal in a checkpoint and in the run that resumes from it."""
    config = run.training.config
    fields = [name for kind, names in _MODEL_FIELDS.items() if isinstance(config, kind) for name in names]
    values = dataclasses.asdict(config)
    return {"model": {name: values[name] for name in (*config.sizes_of_ends, *fields)}}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _valid(make: Callable[[], Any]) -> Any:
    """The result of `make()`. A ValueError of the models becomes a DhelixError with the same message."""
    try:
        return make()
    except ValueError as error:
        raise DhelixError(str(error)) from error
