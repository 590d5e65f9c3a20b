"""`dhelix train`: reads the flags, prepares devices and checkpoints, calls `trainer`, and shows the progress."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.defaults import INTERRUPTED
from dhelix.launch.shown import json_output
from dhelix.launch.shown.progress import Progress, say
from dhelix.launch.train import loop, step_flags, trainer
from dhelix.launch.train.data import tokenizers
from dhelix.launch.train.data.batches import Batches
from dhelix.launch.train.generation import Generated, generate
from dhelix.launch.train.loop import COMPARED, Run, Step, Stopping, exit_status, traced_steps
from dhelix.launch.train.meshes.pipelined import PipelinedTraining
from dhelix.launch.train.meshes.sharded import ShardedTraining
from dhelix.launch.train.options import Options
from dhelix.launch.train.saved import notes, weights
from dhelix.launch.train.saved.checkpoint import Checkpoints
from dhelix.launch.train.watch import results
from dhelix.passes.framework import headline
from dhelix.passes.framework.report import Report
from dhelix.passes.plans import plan_files
from dhelix.runtime.compiler import deviceless, registration
from dhelix.runtime.processes.launch_settings import without_graphs
from dhelix.runtime.step.options import StepOptions


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Trains as the flags say, and returns the exit status. Raises DhelixError if the training fails."""
    if arguments:
        raise DhelixError(f"{arguments[0]!r} is not a flag; see `dhelix train --help`")
    chosen: dict[str, Any] = values.flag_values_dict()
    _check(chosen)
    for name, needed in _ONLY_WITH.items():
        if values[name].present and not chosen[needed]:
            raise DhelixError(f"--{name} has no effect without --{needed}; give both or neither")
    if chosen["init_from"] and values["preset"].present:
        raise DhelixError("--init_from gives the model; leave --preset out")
    named = {field.name: chosen[field.name] for field in dataclasses.fields(Options) if field.name != "step"}
    options = Options(**named, step=StepOptions(**step_flags.given(chosen)))
    with json_output.alone(chosen["json"]) as write:
        _prepare_devices(chosen)
        _check_writable(options)
        quiet = jax.process_index() > 0
        console = Console(stderr=chosen["json"], quiet=quiet)
        prepared = trainer.prepare(options, lambda text: say(console, text))
        _introduce(prepared, console)
        generated, status, error = None, 0, None
        try:
            status = _trained(prepared, console, chosen["verbose"])
            generated = None if status else _use(prepared, console)
        except BaseException as caught:
            error = caught
            raise
        finally:
            if chosen["json"] and not quiet:
                write(results.to_json(prepared, generated, error))
    return status


def _trained(run: Run, console: Console, verbose: bool) -> int:
    """Takes the steps of the run. Returns the exit status, which is not 0 if a signal has ended the run."""
    options, checkpoints = run.options, None
    with contextlib.ExitStack() as stack:
        if options.checkpoint_dir is not None:
            made = Checkpoints(options.checkpoint_dir, trainer.identity(run), options.keep, notes.notes(run))
            checkpoints = stack.enter_context(made)
        trainer.start(run, checkpoints, lambda text: say(console, text))
        wish = stack.enter_context(Stopping(lambda: say(console, _ENDS)))
        try:
            steps = _train(run, checkpoints, wish, console, verbose)
        except KeyboardInterrupt:
            say(console, f"Interrupted; {_saved(checkpoints)}")
            return INTERRUPTED
        if wish.signal and steps[-1].number < options.steps:
            if checkpoints is not None:
                checkpoints.wait()
            say(console, f"Interrupted after step {steps[-1].number}; {_saved(checkpoints)}")
            return exit_status(wish.signal)
        if checkpoints is not None and steps:
            checkpoints.wait()
            say(console, f"saved step {steps[-1].number} in {options.checkpoint_dir}")
    return 0


def _use(run: Run, console: Console) -> Generated | None:
    """Writes the trained model, lets it generate, and says where the trace is: whatever the options ask for."""
    options, generated = run.options, None
    if options.export is not None:
        weights.export(run, options.export)
        say(console, f"wrote the model to {options.export}, as transformers reads it")
    if options.generate is not None:
        tokenizer = tokenizers.load(weights.tokenizer_of(options), options.end_token)
        generated = generate(run, tokenizer, options.generate, options.generate_tokens, options.temperature)
        say(console, str(generated))
    if options.trace is not None:
        first, last = traced_steps(options)
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        if not any(file.stat().st_size for file in Path(options.trace).rglob("*.xplane.pb")):
            raise DhelixError(f"the trace of {which} could not be written to {options.trace}; free space there")
        say(console, f"wrote a profiler trace of {which} to {options.trace}")
    return generated


_ENDS = "ends after this step; another signal ends at once"


def _saved(checkpoints: Checkpoints | None) -> str:
    return "without --checkpoint_dir nothing was saved" if checkpoints is None else checkpoints.newest()


def _check(chosen: dict[str, Any]) -> None:
    """Raises DhelixError if flags exclude one another, or if a flag is missing that another flag needs."""
    for name, value in chosen.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise DhelixError(f"--{name} {value} is no number to train with; give a finite one")
    if chosen["plain"] and chosen["interleave"]:
        raise DhelixError("--plain and --interleave exclude each other; give one of them")
    if chosen["plain"] and chosen["verify"]:
        raise DhelixError("--verify compares the interleaved step with the plain one; leave out --plain or --verify")
    if chosen["pp"] > 1 and chosen["verify"]:
        raise DhelixError(
            "--verify compares with the step without strands, which a pipeline does not have; leave out --verify, and "
            "compare losses with a run without --pp"
        )
    for name in step_flags.given(chosen):
        if chosen["plain"]:
            raise DhelixError(f"--{name} applies only to interleaved strands; leave out --plain or --{name}")
    if chosen["plan"] and chosen["schedule"] and not plan_files.load(chosen["plan"]).leaves_program:
        raise DhelixError("a plan already sets the order; leave out --schedule or --plan")
    if chosen["trace"] and chosen["steps"] < 2:
        raise DhelixError("--trace records the last step, but the first step compiles; give --steps 2 or more")
    if chosen["export"] and Path(chosen["export"]).exists():
        raise DhelixError(f"--export {chosen['export']} exists; give a new folder")
    if chosen["trace_steps"] and not chosen["trace"]:
        raise DhelixError("--trace_steps needs --trace; give the folder")
    if chosen["trace_steps"]:
        traced_steps(Options(steps=chosen["steps"], trace_steps=chosen["trace_steps"]))
    if chosen["plain"] and chosen["compare_plain"]:
        raise DhelixError("--compare_plain times steps with passes and without; leave out --plain or --compare_plain")
    if chosen["compare_plain"] and chosen["steps"] <= 2 * COMPARED:
        first, last = COMPARED + 2, 2 * COMPARED + 1
        raise DhelixError(f"--compare_plain runs steps {first} to {last} without passes; give --steps {last} or more")
    for name in ("resume", "auto_resume", "save_every"):
        if chosen[name] and not chosen["checkpoint_dir"]:
            raise DhelixError(f"--{name} needs --checkpoint_dir; give the folder")
    if chosen["resume_step"] and not chosen["resume"]:
        raise DhelixError("--resume_step needs --resume; a job that starts again and again takes the newest checkpoint")
    if chosen["resume"] and not Path(chosen["checkpoint_dir"]).is_dir():
        folder = Path(chosen["checkpoint_dir"]).absolute()
        raise DhelixError(f"no checkpoint in {folder}; leave out --resume to start a new run")
    for name in ("coordinator", "num_processes", "process_id"):
        if chosen[name] is not None and not chosen["distributed"]:
            raise DhelixError(f"--{name} has no effect without --distributed; give both or neither")


_ONLY_WITH = {
    "eval_fraction": "eval_every", "eval_batches": "eval_every", "generate_tokens": "generate",
    "temperature": "generate", "keep": "checkpoint_dir",
}  # fmt: skip
"""Flags that would be ignored without another one."""


def _check_writable(options: Options) -> None:
    """Raises DhelixError if nothing can be written where files are due at the end, when the training would be lost."""
    folders = {} if options.trace is None else {"trace": Path(options.trace)}
    if options.export is not None and jax.process_index() == 0:
        folders["export"] = Path(options.export).absolute().parent
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise DhelixError(
                f"--{name} {getattr(options, name)} cannot be written ({error.strerror}); give another"
            ) from None


def _prepare_devices(chosen: dict[str, Any]) -> None:
    """Sets everything that must be set before JAX looks for devices."""
    deviceless.prepare_environment()
    if chosen["trace"]:
        without_graphs(os.environ)  # a trace of CUDA graphs names no instructions
    if chosen["cpu_devices"]:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", chosen["cpu_devices"])
    if chosen["distributed"]:
        try:
            jax.distributed.initialize(chosen["coordinator"], chosen["num_processes"], chosen["process_id"])
        except (ValueError, RuntimeError) as error:
            raise DhelixError(
                f"the processes cannot find each other ({error}); outside Slurm and Kubernetes give --coordinator, "
                "--num_processes and --process_id"
            ) from error


def _train(run: Run, checkpoints: Checkpoints | None, wish: Stopping, console: Console, verbose: bool) -> list[Step]:
    board = _board(run, console) if run.options.tensorboard else contextlib.nullcontext()
    if run.first < run.options.steps:
        say(console, "compiles the step, which takes a while")
    with board as board, Progress(console, run.first, run.options.steps) as progress:

        def show(steps: list[Step]) -> None:
            step = steps[-1]
            if len(steps) == 1 and (report := run.report()) is not None:
                for line in summary(report, verbose):
                    say(console, line)
            if board is not None:
                board.write(step)
            compiled = len(steps) == 1  # the time of the first step says nothing of the others
            left = () if console.is_terminal else (results.time_left(run, steps),)  # the bar shows its own
            words = () if compiled else (*results.speed(run, steps), *left)
            progress.update(step.number, str(step), *words, always=step.evaluation is not None or step.skipped)
            if len(steps) == 2 * COMPARED + 1 and (gain := results.measured_gain(steps)) is not None:
                say(console, gain)

        steps = loop.train(run, checkpoints, show, wish.wished)
    if len(steps) > 1:  # the first one compiles
        milliseconds = 1e3 * results.step_seconds(steps)
        say(console, f"median step {milliseconds:,.0f} ms, {', '.join(results.speed(run, steps))}")
    return steps


def _board(run: Run, console: Console) -> Any:
    from dhelix.launch.train.watch.tensorboard import TensorBoard  # needs tensorboardX, which others need not have

    return TensorBoard(run.options.tensorboard or "", run, lambda text: say(console, text))


def summary(report: Report, verbose: bool = False) -> list[str]:
    """Lines about the outcome and the gain of the step. If `verbose`, a line for each pass that ran follows."""
    lines = headline.text(report).splitlines()
    for entry in (entry for entry in report if entry.ran and verbose):
        words = [f"{entry.name}: {entry.outcome}", *entry.summary]
        if entry.instruction_difference:
            words.append(f"{entry.instructions_before} -> {entry.instructions_after} instructions")
        lines.append(", ".join(words))
    return lines


def _introduce(run: Run, console: Console) -> None:
    config, mesh = run.training.config, run.training.mesh
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    size = f"{config.parameter_count:,} parameters, {config.layers} layers, {config.dtype}"
    how = f"{run.options.microbatches} micro-batches"
    if isinstance(run.training, PipelinedTraining):
        how += f", schedule {run.training.fold.schedule}"
    if run.options.states is not None:
        group = run.options.states_group
        how += f", states {run.options.states}" + (f" in groups of {group}" if group else "")
    elif isinstance(run.training, ShardedTraining) and run.training.states is not None:
        how += f", states by the plan: {run.training.states}"
    how += ", plain" if run.options.plain else ", passes on" if registration.enabled() else ", passes off (DHELIX=off)"
    say(
        console,
        f"{run.options.init_from or run.options.preset}: {size}; {how}; {axes} on {mesh.devices.flat[0].device_kind}",
    )
    say(console, f"data: {_data(run.batches)}; a step takes {run.batch} sequences of {run.seq}")


def _data(batches: Batches) -> str:
    documents = batches.rows.documents
    count = f"{len(documents):,} document{'s' * (len(documents) > 1)}"
    masks = ", masked" if batches.rows.masked else ""
    unit = "bytes" if documents.tokenizer == "bytes" else f"tokens of {documents.tokenizer}"
    return f"{documents.name}, {count}{masks}, {documents.size:,} {unit}, an epoch of {batches.per_epoch:,.1f} steps"
