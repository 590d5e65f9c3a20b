"""The loop of training: takes steps, evaluates, saves, and ends in order when it has to.

    run = trainer.prepare(options)
    trainer.start(run, checkpoints)
    steps = train(run, checkpoints, on_step=show)

What may happen, and what the loop does:

    Ctrl-C, SIGTERM      ends after the step that runs, and saves a checkpoint; all processes end after the same step
    not finite           a loss or gradients: writes the step's batch to a file; `--on_nan skip` goes on without the
                         update, else it ends before such an update can be saved
    kill -9, power off   nothing: checkpoints are renamed when they are complete, so a resumed run takes the newest
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from dhelix.errors import DhelixError
from dhelix.launch.train.data.batches import Batches
from dhelix.launch.train.options import Options
from dhelix.launch.train.saved.checkpoint import Checkpoints
from dhelix.models import Training, TrainState
from dhelix.passes.framework.report import Report

_MOST_SKIPPED = 10  # steps in a row without an update; then the run is lost, and says so
COMPARED = 10  # steps that are timed with passes, and then without

StepFunction = Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of one optimizer step.

    Attributes:
      number: the step's number, counted from 1.
      loss: mean loss, in nats per token.
      seconds: how long the step took, until its results and the next batch were there.
      metrics: the step's other metrics by name. For a model with experts, `dropped` is the fraction of the experts'
        choices that were dropped.
      evaluation: loss of the documents for evaluation after this step; None if it was not evaluated.
      plain: whether the step ran without passes, to compare.
      skipped: whether its update was skipped, because a loss or a gradient was not finite.
    """

    number: int
    loss: float
    grad_norm: float
    seconds: float
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluation: float | None = None
    plain: bool = False
    skipped: bool = False

    def __str__(self) -> str:
        dropped = f", dropped {self.metrics['dropped']:.1%}" if "dropped" in self.metrics else ""
        evaluated = "" if self.evaluation is None else f", evaluation {self.evaluation:.4f}"
        return f"loss {self.loss:.4f}{dropped}{evaluated}{', skipped' if self.skipped else ''}"


@dataclasses.dataclass
class Run:
    """A training run: the train step, its state and its data.

    Attributes:
      step: the compiled train step, with passes unless the options say otherwise.
      plain_step: the same step without passes, to compare; None if that is not asked for.
      evaluate: maps a state to the loss of the documents for evaluation; None if there are none.
      state: the train state; None until `start` makes or restores the state.
      first: number of steps that were taken before this run.
      first_row: number of rows that were read before this run.
      taken: the results of the steps that `train` has taken so far, also if it fails.
    """

    options: Options
    training: Training
    batches: Batches
    step: StepFunction
    plain_step: StepFunction | None = None
    evaluate: Callable[[TrainState], float] | None = None
    state: Any = None
    first: int = 0
    first_row: int = 0
    taken: list[Step] = dataclasses.field(default_factory=list)

    @property
    def batch(self) -> int:
        """Number of sequences of a step."""
        return self.batches.batch

    @property
    def seq(self) -> int:
        return self.training.config.seq

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    def rows_after(self, number: int) -> int:
        """Number of rows that were read before step `number` + 1."""
        return self.first_row + (number - self.first) * self.batch

    def abstract_batch(self) -> dict[str, Any]:
        """A batch of the run as `jax.ShapeDtypeStruct`s."""
        found = self.training.abstract_batch(self.batch)
        return found | ({"segments": found["tokens"]} if self.batches.rows.masked else {})

    def report(self) -> Report | None:
        """The report of the passes; None for a plain run."""
        if self.options.plain:
            return None
        return self.step.report(self.training.abstract_state(), self.abstract_batch())  # type: ignore

    def take_steps(self) -> Iterator[Step]:
        """Takes the remaining steps one by one and yields their results.

        Raises:
          DhelixError: a loss or gradients are not finite, and the options do not say to skip such steps; or too many
            steps in a row had to be skipped.
        """
        skipped, batches = 0, self.batches.after(self.first_row)
        following = next(batches)
        for number in range(self.first, self.options.steps):
            batch, last = following, number + 1 == self.options.steps
            begun = time.perf_counter()
            plain = self.plain_step is not None and COMPARED < number - self.first <= 2 * COMPARED
            step = self.plain_step if plain and self.plain_step else self.step
            with self._recorded(number):
                self.state, metrics = step(self.state, batch)
                following = batch if last else next(batches)  # read and placed while the devices compute
                others = {name: float(value) for name, value in metrics.items()}
                loss, grad_norm = others.pop("loss"), others.pop("grad_norm")
            seconds = time.perf_counter() - begun
            finite = math.isfinite(loss) and math.isfinite(grad_norm)  # such gradients spoil the parameters
            if not finite:
                self._lost(number + 1, loss, batch, skipped)
            skipped = 0 if finite else skipped + 1
            due = self.options.eval_every is not None and (last or (number + 1) % self.options.eval_every == 0)
            evaluation = self.evaluate(self.state) if due and self.evaluate is not None else None
            yield Step(number + 1, loss, grad_norm, seconds, others, evaluation, plain, not finite)

    def _recorded(self, number: int) -> contextlib.AbstractContextManager[object]:
        """A context that records a profiler trace if step `number` is the first of those to record."""
        if self.options.trace is None:
            return contextlib.nullcontext()
        first, last = traced_steps(self.options)
        return _Trace(self.options.trace, number + 1 == first, number + 1 == last)

    def _lost(self, number: int, loss: float, batch: dict[str, jax.Array], skipped: int) -> None:
        """Writes down the batch of a step that is not finite. Raises DhelixError if the run has to end."""
        file = Path(self.options.checkpoint_dir or ".") / f"bad_batch_{number}_{jax.process_index()}.npz"
        first = self.rows_after(number - 1)
        own = [self.batches.row(first + n) for n in self.batches.own]
        arrays = {name: np.stack([row[name] for row in own]) for name in batch}
        try:
            np.savez(file, allow_pickle=False, first_row=first, **arrays)
            kept = f"its batch is in {file}"
        except OSError as error:
            kept = f"its batch could not be written to {file} ({error.strerror})"
        what = f"the loss of step {number} is {loss}"
        if math.isfinite(loss):
            what = f"the gradients of step {number} are not finite, at a loss of {loss:.4f}"
        if self.options.on_nan == "stop" and number == self.first + 1:
            raise DhelixError(
                f"{what}, before this run has updated anything; {kept}; parameters are "
                "not finite or far too large, or the batch is to blame: start from another checkpoint"
            )
        if self.options.on_nan == "stop":
            raise DhelixError(
                f"{what}; {kept}; use a smaller --lr than {self.options.lr}, or go on "
                "without such steps by --on_nan skip"
            )
        if skipped + 1 >= _MOST_SKIPPED:
            raise DhelixError(
                f"{skipped + 1} steps in a row had a loss or gradients that are not finite, up to step {number}; "
                f"{kept}; start from a checkpoint before them, or anew, with a smaller --lr than {self.options.lr}"
            )


def traced_steps(options: Options) -> tuple[int, int]:
    """The first and the last step that `--trace` records.

    Raises:
      DhelixError: `trace_steps` is malformed, or the run has no such steps.
    """
    if options.trace_steps is None:
        return options.steps, options.steps
    first, _, last = options.trace_steps.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise DhelixError(f"--trace_steps {options.trace_steps} names no steps; write 10, or 10-12")
    steps = int(first), int(last or first)
    if not 2 <= steps[0] <= steps[1] <= options.steps:
        raise DhelixError(
            f"--trace_steps {options.trace_steps}: give steps from 2, as the first one compiles, to {options.steps}"
        )
    return steps


def untraceable(run: Run) -> str | None:
    """Why a resumed run cannot record the steps that it should, with what to do; None if it can."""
    first, last = traced_steps(run.options)
    compiled = run.first + 1
    if first > compiled:
        return None
    left = run.options.steps - compiled
    instead = "give a larger --steps, or leave --trace out"
    if left > 0:
        instead = f"give --trace_steps from {compiled + 1}" + (f" to {run.options.steps}" if left > 1 else "")
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    return (
        f"--trace cannot record {which}: the run resumes after step {run.first}, and its first step compiles; {instead}"
    )


class _Trace(contextlib.AbstractContextManager["_Trace"]):
    """Starts the profiler before a step, and stops it after a step."""

    def __init__(self, folder: str, starts: bool, stops: bool) -> None:
        self.folder, self.starts, self.stops = folder, starts, stops

    def __enter__(self) -> Self:
        if self.starts:
            jax.profiler.start_trace(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        if self.stops:
            jax.profiler.stop_trace()


class Stopping(contextlib.AbstractContextManager["Stopping"]):
    """Turns the first Ctrl-C or SIGTERM into a wish to end after the step that runs. The second one ends at once.

    With several processes, the one that is asked tells the others, so that all end after the same step.

    Attributes:
      signal: the signal that asked, or 0.
    """

    def __init__(self, on_wish: Callable[[], None] = lambda: None) -> None:
        self.signal, self._before, self._on_wish = 0, dict[int, Any](), on_wish

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # signals belong to the main thread
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: object) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        self._on_wish()

    def wished(self) -> bool:
        """Whether any process was asked to end. All processes call this after the same step."""
        if jax.process_count() == 1:
            return bool(self.signal)
        from jax.experimental import multihost_utils

        asked = multihost_utils.process_allgather(np.int32(self.signal))
        self.signal = int(np.max(asked))
        return bool(self.signal)


def train(
    run: Run,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[list[Step]], None] = lambda steps: None,
    wished: Callable[[], bool] = lambda: False,
) -> list[Step]:
    """Takes the remaining steps. Saves a checkpoint every `save_every` steps and at the end.

    Args:
      on_step: called after each step with the results of all steps so far.
      wished: whether to end after the step that was just taken.

    Returns:
      The results of all steps.
    """
    options, steps = run.options, run.taken
    for step in run.take_steps():
        steps.append(step)
        on_step(steps)
        ends = wished() or step.number == options.steps
        due = options.save_every is not None and step.number % options.save_every == 0
        if checkpoints is not None and (due or ends):
            rows = {"rows": run.rows_after(step.number)}
            checkpoints.save(step.number, run.training.to_model_order(run.state), rows)
        if ends:
            break
    return steps


def exit_status(number: int) -> int:
    """The exit status of a program that ended because of this signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number
