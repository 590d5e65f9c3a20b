"""The loss of documents that are not trained on.

    evaluate = make_evaluation(options, training, rows, batch)
    evaluate(state)                              mean loss of the first `eval_batches` batches, in nats per token

The batches are the same each time, in the order of the documents. The z-loss does not count, and with experts, neither
do the losses of the router. Without a pipeline, XLA drops the backward pass, because nothing reads its gradients. A
pipeline runs it, because its schedule goes backward.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import islice
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.launch.train.data.batches import Batches
from dhelix.launch.train.data.documents import Documents
from dhelix.launch.train.data.rows import Rows
from dhelix.launch.train.meshes.pipelined import PipelinedTraining
from dhelix.launch.train.options import Options
from dhelix.models import Training, TrainState
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.strand_interleave import interleaved


def documents_of(options: Options, documents: Documents, other: Documents | None) -> tuple[Documents, Documents | None]:
    """The documents to train on and those to evaluate on, if any.

    Args:
      other: documents of their own for evaluation.

    Raises:
      DhelixError: no evaluation is asked for, but documents for it; or the fraction is none.
    """
    if options.eval_every is None:
        if other is not None:
            raise DhelixError("--eval_data needs --eval_every; give the number of steps between evaluations")
        return documents, None
    if other is not None:
        return documents, other
    if not 0.0 < options.eval_fraction < 1.0:
        raise DhelixError(f"--eval_fraction {options.eval_fraction:g}: give a part of the documents, such as 0.05")
    return documents.split(options.eval_fraction)


def make_evaluation(options: Options, training: Training, rows: Rows, batch: int) -> Callable[[TrainState], float]:
    """A function that maps a state to the mean loss of the first batches of `rows`.

    Args:
      training: the train step, made without a z-loss.
      batch: number of sequences of a batch.
    """
    measure: Any = jax.jit(training.measure)
    if isinstance(training, PipelinedTraining):
        how = StepOptions(microbatches=training.microbatches, pipeline=training.fold, passes=())
        measure = interleaved(training.measure, how)
    batches = Batches(rows, batch, training.batch_sharding, seed=None)
    count = min(options.eval_batches, math.ceil(len(rows) / batch))

    def evaluate(state: TrainState) -> float:
        found = [measure(state, arrays) for arrays in islice(batches.after(0), count)]
        return statistics.fmean(float(one.get("cross_entropy", one["loss"])) for one in found)

    return evaluate
