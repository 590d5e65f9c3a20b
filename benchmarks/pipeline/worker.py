"""A process of `run.py`: `strands/worker.py` for variants with their own train steps.

Variants with different state layouts cannot hand a state on. So each turn of another train step begins with a new
state, made from the same key. Each step's time is also predicted from its schedule (`predictions.py`).
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from dhelix import strand_interleave
from dhelix.benchmarks.pipeline.predictions import Predictions
from dhelix.benchmarks.pipeline.variants import NO_GRAPHS, VARIANTS, Variant, options_of, training_of
from dhelix.benchmarks.strands.results import Result, Run
from dhelix.benchmarks.strands.worker import Worker, describe, work
from dhelix.errors import DhelixError
from dhelix.models import Training, preset
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import compiled_module


class PipelineWorker(Worker):
    """The variants of one setting. The first one's train step describes the run."""

    variants = VARIANTS

    def __init__(self, options: Namespace) -> None:
        self.trainings: dict[Variant, Training] = {}
        super().__init__(options)

    def make_training(self) -> Training:
        return self.training_of(VARIANTS[self.options.variants[0]])

    def describe(self) -> Run:
        run = describe(self.options, self.training)
        run.workload |= {"stages": self.options.stages, "tp": self.options.tp // self.options.stages}
        return run

    def training_of(self, variant: Variant) -> Training:
        """A variant's train step. Variants that differ only in the order of instructions share it and its state."""
        same = replace(variant, name="", order="xla")
        if same not in self.trainings:
            o = self.options
            config = preset(o.preset, o.layers, seq=o.seq, vocab=o.vocab)
            devices = deviceless.topology(o.hardware.lower(), f"1x1x{o.tp}").devices if o.on_paper else jax.devices()
            stages, tp = o.stages, o.tp // o.stages
            self.trainings[same] = training_of(variant, config, stages, tp, o.microbatches, devices)
        return self.trainings[same]

    def build(self, variant: Variant) -> tuple[Any, dict[str, str], float]:
        training = self.training_of(variant)
        example = training.abstract_state(), training.abstract_batch(self.options.microbatches)
        options = options_of(variant, training, self.setting)
        step = strand_interleave(training.train_step, donate_argnums=0, **options)
        compiled = self.xla(step.lower(*example), dict(NO_GRAPHS))
        if not options["passes"] or training.mesh.devices.flat[0].platform == "cpu":
            return compiled, {}, 0.0
        report = step.report(*example)
        return compiled, {entry.name: entry.outcome for entry in report}, sum(s.seconds for s in report.stages)

    def parts(self) -> Iterator[None]:
        yield from super().parts()
        if jax.default_backend() == "gpu":
            self.predict_all()

    def predict_all(self) -> None:
        """Adds each step's predicted time, and results for pipelines that have no program."""
        o, programs = self.options, {p.variant.name: compiled_module(p.compiled) for p in self.programs}
        try:
            predictions = Predictions(self.setting, programs, o.layers, o.stages, o.microbatches)
            found = predictions.all()
        except DhelixError as error:
            self.run.dropped.append(f"setting {self.setting.name}: predictions: {error}")
            return
        self.run.on[f"predicted from, {self.setting.name}"] = predictions.facts()
        for result in self.run.results:
            result.predicted_ms = found.pop(result.variant, None)
        self.run.results += [Result(self.setting.name, name, predicted_ms=ms) for name, ms in found.items()]


def main() -> None:
    options = Namespace(**json.loads(sys.argv[1]))
    if options.on_paper:
        deviceless.prepare_environment()
    work(PipelineWorker(options))


if __name__ == "__main__":
    main()
