"""The steps of the shipped profile, compiled without a GPU, contain only kernels that were measured."""

from __future__ import annotations

import pytest

from dhelix.launch.train import trainer
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.replay.operators import find_operators
from dhelix.profiles.files import storage
from dhelix.profiles.keys import OperatorKey
from dhelix.profiles.profile import Section
from dhelix.runtime.compiler import autotune_results, deviceless, lowering, tuned
from dhelix.tests.quick import slow_but

SETTING = "default"


@pytest.fixture(scope="module")
def measured() -> Section:
    return storage.load(autotune_results.SHIPPED / storage.file_name("H200", "nvlink")).sections[SETTING]


@pytest.mark.deviceless
@pytest.mark.parametrize("preset", slow_but(["llama-8b"], ["llama-8b", "llama-25b"]))
def test_every_operator_of_a_tuned_step_was_measured(preset: str, measured: Section) -> None:
    """The target description, the autotuning results and the profile must be replaced together."""
    decays_all = "mask=None"  # the measured steps also decayed norms, which one more small kernel updates now
    options = trainer.Options(preset, layers=4, mesh="tp=4", plain=True, optimizer_options=decays_all)
    devices = deviceless.topology("h200", "1x1x4").devices
    training, batch = trainer.make_training(options, trainer.configuration(options), devices)
    step = trainer.make_step(training, options.plain)
    lowered = step.lower(training.abstract_state(), training.abstract_batch(batch))
    module = lowering.compiled_module(tuned.compile(lowered))
    operators, _ = find_operators(module, key_of)
    assert len(operators) > 100
    unmeasured = [o.key for o in operators if measured.solo(o.key) is None]
    # Kernels of a single number compute the learning rate.
    assert [str(key) for key in unmeasured if not isinstance(key, OperatorKey) or key.sizes] == []
