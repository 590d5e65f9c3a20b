"""The process that tunes. `python -m dhelix.launch.tune.worker REQUEST.json` runs it.

It prints JSON objects. Before each piece of work: {"what": "all collectives ring simple", "patience": 90}. After a
measurement: {"patience": 900}, because the worker may now fit models without a word. At the end: {"finished": {...}}
with all results, or {"error": "..."}. With "crashed", the step failed, perhaps of its settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.launch.profile.step import name_of
from dhelix.launch.profile.workers import end_with_stdin, tell
from dhelix.launch.train import trainer
from dhelix.passes.plans import plan_files
from dhelix.runtime.profiling.measure import reason
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.tuning import tune_step
from dhelix.runtime.tuning.tuned import as_json

COMPILES = 900.0
"""Seconds that work without the GPUs may take: compilation, orders, and fits of models."""

_WITHOUT_GPUS = ("compiles", "orders")
"""Words in the lines on such work."""


@dataclass(frozen=True)
class Request:
    """The task of a worker.

    Attributes:
      preset: fields of `trainer.Options` that describe the step.
      options: options of the decorator, by name.
      plan: plan file to which the settings are added, or None.
      out: plan file to write.
      minutes: time after which the search stops. With 0, only NCCL's defaults are measured.
      patience: seconds that one measurement may take.
      order: whether the step may be ordered anew for the tuned collectives.
      records: file of measurements, or None.
      node: keywords of `jax.distributed.initialize` as `workers.environments` names them, or None.
      check: with 0 minutes, the settings of the plan are measured, too.
    """

    preset: Mapping[str, Any]
    options: Mapping[str, Any]
    plan: str | None
    out: str
    minutes: float
    patience: float
    order: bool = True
    records: str | None = None
    node: Mapping[str, Any] | None = None
    check: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def run(request: Request) -> dict[str, Any]:
    """Tunes, writes the plan, and returns all results as JSON values. Raises DhelixError if this is impossible."""
    if request.node:
        node = request.node
        jax.distributed.initialize(
            node["coordinator"], node["processes"], node["process"], local_device_ids=node["local_device_ids"]
        )
    given = trainer.Options(**request.preset, step=StepOptions(**request.options))
    config = trainer.configuration(given)
    training, batch = trainer.make_training(given, config, jax.devices())
    step = trainer.make_step(training, False, given.step)
    shape = (batch, config.seq + 1)

    def tokens() -> dict[str, jax.Array]:
        return {"tokens": jax.random.randint(jax.random.key(1), shape, 0, config.vocab)}

    # NCCL takes the plugin only if it is installed before NCCL makes its first communicator.
    tune_step.prepare()
    arguments = training.init(jax.random.key(0)), jax.jit(tokens, out_shardings=training.batch_sharding)()
    plan = None if request.plan is None else plan_files.load(request.plan)
    tuned = tune_step.tune(
        step,
        *arguments,
        out=request.out,
        plan=plan if plan is None or request.check else replace(plan, tuning=None),
        minutes=request.minutes,
        order=request.order,
        records=request.records,
        progress=lambda what: tell(what=what, patience=patience(what, request.patience)),
        measured=lambda: tell(patience=COMPILES),
        name=name_of(given, training),
        use_up=True,
    )
    return as_json(tuned)


def patience(what: str, of_measurement: float) -> float:
    """Seconds that the work in a line of progress may take."""
    return COMPILES if any(word in what.split() for word in _WITHOUT_GPUS) else of_measurement


def main(path: str) -> None:
    """Runs the request in the file `path`. Exits with status 1 after an error."""
    request = Request(**json.loads(Path(path).read_text()))
    try:
        tell(finished=run(request))
    except DhelixError as error:
        tell(error=" ".join(str(error).split()))
        sys.exit(1)
    except jax.errors.JaxRuntimeError as error:  # perhaps of the settings that are being measured
        tell(error=reason(error), crashed=True)
        sys.exit(1)


if __name__ == "__main__":
    end_with_stdin()
    main(sys.argv[1])
