"""A pipelined step computes what the plain loop over micro-batches does, whatever the mesh and the schedule."""

import numpy as np
import pytest

from dhelix.tests.runtime.pipeline.models import Setting, assert_close, pipelined_steps, plain_steps

SETTINGS = [
    Setting(pp=2, microbatches=1, layers=4),
    Setting(pp=2, microbatches=5, layers=7, shared=True),  # odd, and layers that do not divide
    Setting(pp=4, microbatches=3, layers=9),  # fewer micro-batches than stages
    Setting(pp=4, microbatches=4, layers=8, shared=True),  # as many
    Setting(pp=8, microbatches=5, layers=16),
    Setting(pp=2, tp=2, dp=2, microbatches=4, layers=4, shared=True),
    Setting(pp=2, tp=2, dp=2, microbatches=3, layers=5),
    Setting(pp=2, microbatches=5, layers=5, schedule="1f1b"),
    Setting(pp=2, tp=2, dp=2, microbatches=3, layers=5, shared=True, schedule="interleaved"),
    Setting(pp=2, tp=2, dp=2, microbatches=5, layers=5, schedule="dualpipev"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_optimizer_steps_are_those_without_a_pipeline(setting: Setting) -> None:
    state, losses = pipelined_steps(setting)
    expected, expected_losses = plain_steps(setting.alone)
    assert losses[-1] < losses[0]
    assert_close(np.array(losses), np.array(expected_losses))
    assert_close(state, expected)
