"""Files for TensorBoard: a scalar for each metric of each step.

    with TensorBoard("runs/1", run) as board:
        board.write(step)

A resumed run goes on in the same folder. Steps that the run before it took after its last checkpoint are replaced.
"""

from __future__ import annotations

import contextlib
from typing import Self

import jax
import numpy as np
import tensorboardX

from dhelix.errors import DhelixError
from dhelix.launch.train import optimizers
from dhelix.launch.train.loop import Run, Step
from dhelix.launch.train.watch.results import utilization


class TensorBoard(contextlib.AbstractContextManager["TensorBoard"]):
    """Writes the metrics of a run. Only process 0 writes.

    Raises:
      DhelixError: the folder cannot be written.
    """

    def __init__(self, folder: str, run: Run) -> None:
        self._run, self._rate = run, optimizers.learning_rate(run.options)
        self._writer = None
        if jax.process_index() > 0:
            return
        try:
            self._writer = tensorboardX.SummaryWriter(folder, purge_step=run.first + 1 if run.first else None)
        except OSError as error:
            raise DhelixError(f"--tensorboard {folder} cannot be written ({error.strerror}); give another") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
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
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step.number)
