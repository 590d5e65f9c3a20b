"""Steps on real GPUs under every schedule and pipeline have the losses and gradients of the plain step.

    pytest -m gpu tests/launch          # in an environment with the extra `gpu`, which .venv lacks

The tests need at least two GPUs of one host. Most of their time is compilation. Only GPUs execute the passes' orders of
collectives and compute. The other tests only compile such orders; these tests run them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.launch.train.meshes.pipelined import make_pipelined_step
from dhelix.models import LlamaConfig, Training, make_mesh, make_train_step
from dhelix.passes.framework.report import Report
from dhelix.passes.pipeline_fold import SCHEDULES as PIPELINES
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.options import SCHEDULES
from dhelix.runtime.step.strand_interleave import strand_interleave

pytestmark = pytest.mark.gpu

STEPS, MICROBATCHES = 5, 4
TOLERANCE = 2.0**-8
"""Relative tolerance: one rounding to bfloat16."""
CONFIG = LlamaConfig(
    vocab=1024, hidden=1024, layers=4, heads=8, kv_heads=4, head_dim=128, ffn=2816, seq=1024, dtype="bfloat16"
)  # fmt: skip


def gpus() -> list[Any]:
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.fail("needs two GPUs or more")
    return devices


def numbers(training: Training, step: Callable[..., Any]) -> np.ndarray:
    """Losses and gradient norms of STEPS steps."""
    random, state, found = np.random.default_rng(0), training.init(jax.random.key(0)), []
    for _ in range(STEPS):
        tokens = (random.integers(0, CONFIG.vocab, (MICROBATCHES * 2, 1)) + np.arange(CONFIG.seq + 1)) % CONFIG.vocab
        state, metrics = step(state, {"tokens": jax.device_put(tokens.astype(np.int32), training.batch_sharding)})
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.asarray(found)


def training_of(sharding: str) -> Training:
    mesh = make_mesh(2, 1, gpus()) if sharding == "fsdp" else make_mesh(1, 2, gpus())
    return make_train_step(CONFIG, mesh, optax.sgd(0.1, momentum=0.9), MICROBATCHES, sharding)  # type: ignore


@functools.cache
def plain(sharding: str) -> np.ndarray:
    training = training_of(sharding)
    return numbers(training, jax.jit(training.train_step, donate_argnums=0))


def changed(report: Report) -> set[str]:
    return {entry.name for entry in report if entry.changed}


@pytest.mark.parametrize(
    ("sharding", "schedule"), [*(("shard_map", s) for s in SCHEDULES), ("auto", "dp"), ("fsdp", "dp")]
)
def test_five_steps_are_the_plain_steps(sharding: str, schedule: Any) -> None:
    training = training_of(sharding)
    step = strand_interleave(training.train_step, donate_argnums=0, schedule=schedule)
    found = numbers(training, step)
    np.testing.assert_allclose(found, plain(sharding), rtol=TOLERANCE)
    assert found[-1, 0] < found[0, 0], "it learns"
    assert changed(step.report(training.abstract_state(), training.abstract_batch(2 * MICROBATCHES)))


@pytest.mark.parametrize("schedule", PIPELINES)
def test_five_steps_of_a_pipeline_are_the_plain_steps(schedule: str) -> None:
    training = make_pipelined_step(
        CONFIG, make_mesh(1, 1, gpus(), pp=2), optax.sgd(0.1, momentum=0.9), MICROBATCHES, schedule
    )
    step = strand_interleave(training.train_step, donate_argnums=0, microbatches=MICROBATCHES, pipeline=training.fold)
    np.testing.assert_allclose(numbers(training, step), plain("shard_map"), rtol=TOLERANCE)


def loss_of(params: Any, batch: jax.Array) -> jax.Array:
    """The loss of a model that is not in `models`."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x = jax.lax.scan(layer, batch @ params["embedding"], params["layers"])[0]
    return jnp.mean((x @ params["head"]) ** 2)


def own_step(params: Any, batch: jax.Array) -> Any:
    value, grads = value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def own_losses(step: Callable[..., Any], mesh: Mesh, rows: P, fold: Fold | None = None) -> list[float]:
    """Losses of STEPS steps from fixed parameters. `rows` is the sharding of the batch."""
    random = np.random.default_rng(0)
    shapes = {"embedding": (256, 512), "head": (512, 256), "layers": {"up": (4, 512, 1024), "down": (4, 1024, 512)}}
    drawn = jax.tree.map(lambda s: 0.03 * random.standard_normal(s, np.float32), shapes, is_leaf=_is_shape)
    batch = jax.device_put(random.standard_normal((64, 256), np.float32), NamedSharding(mesh, rows))
    state, losses = jax.device_put(drawn, NamedSharding(mesh, P())), []
    state = state if fold is None else fold.fold(state)
    with jax.set_mesh(mesh):
        for _ in range(STEPS):
            state, value = step(state, batch)
            losses.append(float(value))
    return losses


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple)


def test_a_model_of_ones_own_with_explicit_axes() -> None:
    """`jax.make_mesh` makes explicit axes, and XLA inserts the collectives."""
    mesh = jax.make_mesh((2,), ("dp",), devices=gpus()[:2])
    expected = own_losses(jax.jit(own_step), mesh, P("dp"))
    found = own_losses(strand_interleave(own_step, microbatches=4), mesh, P("dp"))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert found[-1] < found[0]


@pytest.mark.parametrize("schedule", PIPELINES)
def test_a_model_of_ones_own_in_a_pipeline(schedule: str) -> None:
    mesh = jax.make_mesh((2,), ("pp",), axis_types=(AxisType.Auto,), devices=gpus()[:2])
    fold = Fold(2, 4, schedule, mesh=mesh)
    found = own_losses(strand_interleave(own_step, microbatches=4, pipeline=fold), mesh, P(), fold)
    np.testing.assert_allclose(found, own_losses(jax.jit(own_step), mesh, P()), rtol=1e-4)
