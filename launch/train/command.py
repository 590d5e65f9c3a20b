"""`dhelix train`: reads the flags, prepares devices and checkpoints, calls `trainer`, and shows the progress."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.defaults import INTERRUPTED
from dhelix.launch.shown.progress import Progress, say
from dhelix.launch.train import step_flags, trainer
from dhelix.launch.train.checkpoint import Checkpoints
from dhelix.launch.train.pipelined import PipelinedTraining
from dhelix.launch.train.sharded import ShardedTraining
from dhelix.launch.train.trainer import Options, Run, Step
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
    named = {field.name: chosen[field.name] for field in dataclasses.fields(Options) if field.name != "step"}
    options = Options(**named, step=StepOptions(**step_flags.given(chosen)))
    _prepare_devices(chosen)
    quiet = jax.process_index() > 0
    console = Console(stderr=chosen["json"], quiet=quiet)
    prepared = trainer.prepare(options)
    _introduce(prepared, console)
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if options.checkpoint_dir is not None:
            made = Checkpoints(options.checkpoint_dir, trainer.identity(prepared), notes=trainer.notes(prepared))
            checkpoints = stack.enter_context(made)
        trainer.start(prepared, checkpoints)
        if checkpoints is not None and prepared.first:
            say_resumed(prepared, checkpoints, console)
        try:
            steps = _train(prepared, checkpoints, console, chosen["verbose"])
        except KeyboardInterrupt:
            say(
                console,
                "Interrupted; "
                f"{'without --checkpoint_dir nothing was saved' if checkpoints is None else checkpoints.newest()}",
            )
            return INTERRUPTED
    if chosen["trace"]:
        say(console, f"wrote a profiler trace of step {options.steps} to {chosen['trace']}")
    if chosen["json"]:
        results = trainer.results(prepared, steps)
        if not quiet:
            print(json.dumps(results, indent=1))
    return 0


def _check(chosen: dict[str, Any]) -> None:
    """Raises DhelixError if flags exclude one another, or if a flag is missing that another flag needs."""
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
    for name in ("resume", "save_every"):
        if chosen[name] and not chosen["checkpoint_dir"]:
            raise DhelixError(f"--{name} needs --checkpoint_dir; give the folder")
    if chosen["resume"] and not Path(chosen["checkpoint_dir"]).is_dir():
        folder = Path(chosen["checkpoint_dir"]).absolute()
        raise DhelixError(f"no checkpoint in {folder}; leave out --resume to start a new run")
    for name in ("coordinator", "num_processes", "process_id"):
        if chosen[name] is not None and not chosen["distributed"]:
            raise DhelixError(f"--{name} has no effect without --distributed; give both or neither")


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


def _train(run: Run, checkpoints: Checkpoints | None, console: Console, verbose: bool) -> list[Step]:
    with Progress(console, run.first, run.options.steps) as progress:

        def show(steps: list[Step]) -> None:
            progress.update(steps[-1].number, str(steps[-1]), *trainer.speed(run, steps))

        steps = trainer.train(run, checkpoints, show)
    milliseconds = 1e3 * trainer.step_seconds(steps)
    say(console, f"median step {milliseconds:,.0f} ms, {', '.join(trainer.speed(run, steps))}")
    report = run.report()
    for line in summary(report, verbose) if report is not None else ():
        say(console, line)
    return steps


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
    say(console, f"{run.options.preset}: {size}; {how}; {axes} on {mesh.devices.flat[0].device_kind}")
    text = f"{run.corpus.name}, {len(run.corpus.tokens):,} bytes"
    say(console, f"text: {text}; a step takes {run.batch} sequences of {run.seq}")


def say_resumed(run: Run, checkpoints: Checkpoints, console: Console) -> None:
    """Prints from which step the run resumes, and each changed setting that makes its batches differ."""
    before, now = checkpoints.notes(run.first), trainer.batch_notes(run)
    say(console, f"resumed from step {run.first} in {checkpoints.folder}")
    for name in (name for name in now if before.get(name) != now[name]):
        change = f"{name} was {before.get(name)} and is now {now[name]}"
        say(console, f"note: {change}, so the batches differ from those of an uninterrupted run")
