"""Files for TensorBoard: a scalar for each metric of each step.

    with TensorBoard("runs/1", run) as board:
        board.write(step)

A resumed run goes on in the same folder. Steps that the run before it took after its last checkpoint are replaced. Each
step is written at once and by this thread, so a full disk is an error here, and never stops the training.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import scalar

from dhelix.errors import DhelixError
from dhelix.launch.train import optimizers
from dhelix.launch.train.loop import Run, Step
from dhelix.launch.train.watch.results import utilization


class TensorBoard(contextlib.AbstractContextManager["TensorBoard"]):
    """Writes the metrics of a run. Only process 0 writes.

    Args:
      say: called with a line of text if nothing more can be written.

    Raises:
      DhelixError: the folder cannot be written.
    """

    def __init__(self, folder: str, run: Run, say: Callable[[str], None] = lambda text: None) -> None:
        self._run, self._rate = run, optimizers.learning_rate(run.options)
        self._folder, self._say, self._writer = folder, say, None
        if jax.process_index() > 0:
            return
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(Path(folder) / "events"))
            if run.first:
                self._write(Event(step=run.first + 1, session_log=SessionLog(status=SessionLog.START)))
        except OSError as error:
            raise DhelixError(f"--tensorboard {folder} cannot be written ({error.strerror}); give another") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def write(self, step: Step) -> None:
        """Adds the metrics of a step. The first step's speed is left out, because it compiles."""
        if self._writer is None:
            return
        scalars = {
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "learning_rate": float(np.asarray(self._rate(step.number - 1))),
        }
        scalars |= step.metrics
        if step.evaluation is not None:
            scalars["evaluation/loss"] = step.evaluation
        if step.number > self._run.first + 1:
            scalars["speed/tokens_per_second"] = self._run.tokens_per_step / step.seconds
            mfu = utilization(self._run, step.seconds)
            scalars |= {} if mfu is None else {"speed/mfu": mfu}
        try:
            for name, value in scalars.items():
                self._write(Event(step=step.number, summary=scalar(name, value)))
            self._writer.flush()
        except OSError as error:
            self._writer = None
            self._say(f"--tensorboard {self._folder} gets no more values: it cannot be written ({error.strerror})")

    def _write(self, event: Event) -> None:
        assert self._writer is not None
        event.wall_time = time.time()
        self._writer.write_event(event)
