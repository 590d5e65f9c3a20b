"""A pipelined step computes the same as the plain loop over micro-batches, on every mesh and schedule."""

from typing import Any

import jax
import numpy as np
import pytest

import dhelix
from dhelix.tests.quick import slow_but
from dhelix.tests.runtime.pipeline.models import (
    Setting,
    assert_close,
    folded,
    in_microbatches,
    initial_state,
    pipelined_step,
    pipelined_steps,
    plain_steps,
    run,
)

SETTINGS = [
    Setting(pp=2, microbatches=1, layers=4),
    # as many micro-batches as stages, and layers that do not divide
    Setting(pp=4, microbatches=4, layers=9, shared=True),
    Setting(pp=8, microbatches=5, layers=16),  # fewer micro-batches than stages, and an odd number
    Setting(pp=2, tp=2, dp=2, microbatches=3, layers=12, shared=True, sends_beside=True),  # chunks of three
    Setting(pp=2, tp=2, dp=2, microbatches=5, layers=5, shared=True, schedule="interleaved_si", sends_beside=True),
    Setting(pp=2, microbatches=10, layers=9, rows=1, schedule="interleaved_si", chunks=4),  # runs of ticks
    Setting(pp=4, microbatches=3, layers=5, schedule="1f1b"),
    Setting(pp=2, tp=2, dp=2, microbatches=3, layers=5, shared=True, schedule="interleaved"),
    Setting(pp=2, tp=2, dp=2, microbatches=5, layers=5, schedule="dualpipev"),
]


def compare(setting: Setting, state: Any, losses: list[float]) -> None:
    expected, expected_losses = plain_steps(setting.alone)
    assert losses[-1] < losses[0]
    assert_close(np.array(losses), np.array(expected_losses))
    assert_close(state, expected)


@pytest.mark.parametrize("setting", slow_but([SETTINGS[7]], SETTINGS), ids=lambda setting: setting.name)
def test_optimizer_steps_are_those_without_a_pipeline(setting: Setting) -> None:
    compare(setting, *pipelined_steps(setting))


def test_a_step_is_traced_where_numbers_are_64_bits_wide() -> None:
    setting = SETTINGS[1]
    with jax.enable_x64(True):
        step = in_microbatches(pipelined_step(setting), setting.microbatches, fold=setting.fold)
        state = folded(initial_state(setting.layers), setting.fold.layout())
        (params, _), _ = jax.eval_shape(step, state, setting.batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_a_decorated_step_on_a_folded_state() -> None:
    """All steps of a user: fold, `strand_interleave(pipeline=)` with its passes, unfold."""
    setting = Setting(pp=2, tp=2, dp=2, microbatches=3, layers=5)
    step = dhelix.strand_interleave(pipelined_step(setting), microbatches=3, pipeline=setting.fold)
    state = jax.tree.map(np.asarray, setting.fold.fold(initial_state(setting.layers), setting.mesh))
    state, losses = run(step, state, setting.batch)
    compare(setting, jax.tree.map(np.asarray, setting.fold.unfold(state, setting.mesh)), losses)
