"""All passes that run before XLA, on the train step of Llama-8B: their effects and their time."""

import functools
import time

import jax
import optax
import pytest

from dhelix.models import preset
from dhelix.models.common.mesh import make_mesh
from dhelix.models.train_step import make_train_step
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import CHANGED, StageReport
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler.lowering import hlo_bytes
from dhelix.runtime.step.pass_lists import default_passes
from dhelix.tests.machine import slowness

LAYERS, MICROBATCHES, SECONDS = 8, 16, 2.0


@functools.cache
def _report(scan_layers: bool) -> tuple[HloModule, StageReport, float]:
    """The module after the passes, their report, and their CPU seconds."""
    config = preset("llama-8b", layers=LAYERS, attention="xla", scan_layers=scan_layers)
    mesh = make_mesh(dp=1, tp=4, devices=jax.devices("cpu")[:4])
    training = make_train_step(config, mesh, optax.adamw(1e-3), MICROBATCHES)
    arguments = training.abstract_state(), training.abstract_batch(MICROBATCHES)
    module = hlo_bytes(jax.jit(training.train_step).lower(*arguments))
    start = time.process_time()  # not wall time, because other processes may use the core
    after, report = PassManager(default_passes()).run(Stage.LOWERED, module)
    seconds = time.process_time() - start
    assert after is not None
    return HloModule.from_bytes(after), report, seconds


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scan", "unrolled"])
def test_all_passes_together_take_less_than_two_seconds(scan_layers: bool) -> None:
    _, report, seconds = _report(scan_layers)
    assert seconds < SECONDS * slowness(), [(entry.name, entry.seconds) for entry in report.passes]


def test_every_pass_has_its_effect() -> None:
    module, report, _ = _report(True)
    names = ("strand-duplication", "gradient-accumulation", "activation-sharing")
    duplication, accumulation, sharing = (next(e for e in report.passes if e.name == name) for name in names)
    assert [entry.outcome for entry in (duplication, accumulation, sharing)] == [CHANGED] * 3
    (strands,) = duplication.notes
    (merged,) = strands.facts["merged_loops"]
    assert strands.facts["microbatches"] == MICROBATCHES and merged.endswith(f" x {LAYERS}")
    assert all(note.message == "gradients accumulated layer by layer" for note in accumulation.notes)
    (shared,) = sharing.notes
    assert shared.message == "residuals of both strands share one buffer", "every stack of them, none left"
    assert sum(i.name.startswith("strand_layers.") for c in module.computations for i in c.instructions) == 1


def test_unrolled_layers_become_two_strands() -> None:
    _, report, _ = _report(False)
    *reasons, strands = report.passes[0].notes
    assert [str(note).partition(": ")[0] for note in reasons] == 2 * ["no layer loops merged"]
    assert strands.message == "two strands" and strands.facts["merged_loops"] == []
