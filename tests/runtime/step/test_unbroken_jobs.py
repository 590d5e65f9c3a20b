"""Failures before XLA leave a step alone: it runs as under `jax.jit`, and one line in the log names the cause."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from dhelix.errors import DhelixError
from dhelix.passes.framework.manager import PassContext, PassManager, Stage
from dhelix.passes.framework.report import CHANGED, NOT_RUN
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler import lowering, registration
from dhelix.runtime.step import plain_step, specialization
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import InterleavedStep, strand_interleave
from dhelix.runtime.step.target import Target
from dhelix.tests.quick import slow_after
from dhelix.tests.runtime.steps import batch, squared_error, weights


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    registration.clear()


def train_step(w: jax.Array, data: Any) -> Any:
    loss, gradients = value_and_grad(squared_error)(w, data)
    return w - 0.1 * gradients, loss


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("dhelix: ")]


@dataclass(frozen=True)
class Recurses:
    """A pass that fails as if the program were too deep for it."""

    name = "recurses"
    stage = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        return self.run(module, context)


BROKEN: dict[str, tuple[Any, str]] = {
    "the conversion to HLO": (lowering, "hlo_bytes"),
    "the conversion back": (lowering, "with_hlo"),
    "how many devices there are": (lowering, "device_count"),
    "what it is for": (Target, "of"),
    "what the plain step needs": (plain_step, "memory_limit"),
    "the weighing of collective matmuls": (specialization, "weighed"),
    "a session": (registration, "Session"),
    "the passes": (PassManager, "run"),
    "the fingerprint": (PassManager, "fingerprint"),
    "the check between hosts": (specialization.first_run, "check_order"),
}


@pytest.mark.parametrize("broken", slow_after(3, BROKEN))
def test_a_step_runs_all_the_same(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = jax.jit(train_step)(weights(), batch())
    step = strand_interleave(train_step, microbatches=4)

    def fails(*_: object, **__: object) -> None:
        raise MemoryError("out of order\nand pages of what the compiler has to say")

    owner, name = BROKEN[broken]
    monkeypatch.setattr(owner, name, fails)
    for _ in range(2):
        found = step(weights(), batch())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)
    (line,) = said(caplog)
    assert line == "dhelix: train_step runs as it is: it cannot be interleaved: MemoryError: out of order"
    report = step.report(weights(), batch())
    assert all(entry.outcome == NOT_RUN for entry in report) and "out of order" in str(report)


@pytest.mark.parametrize("broken", BROKEN)
def test_strict_raises_what_failed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = strand_interleave(train_step, microbatches=4, strict=True)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("out of order")

    owner, name = BROKEN[broken]
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(DhelixError, match="train_step cannot be interleaved: RuntimeError: out of order"):
        step(weights(), batch())


def test_a_pass_that_fails_says_so_once_for_each_step(caplog: pytest.LogCaptureFixture) -> None:
    """Once per step, not once per process. Otherwise a second step with the same fault would seem to be interleaved."""
    first, second = (strand_interleave(train_step, microbatches=4, passes=[Recurses()]) for _ in range(2))
    for step in (first, first, second):
        step(weights(), batch())
        step(weights(), batch(32))  # another program of the same step
    lines = said(caplog)
    assert len(lines) == 2 and all("jit_train_step: pass recurses changes nothing" in line for line in lines)


def test_a_function_exported_with_symbolic_shapes_is_interleaved() -> None:
    """Its shapes are unknown until XLA refines them."""
    (rows,) = export.symbolic_shape("rows")
    taught = export.export(jax.jit(lambda x: jax.lax.map(jnp.tanh, x)))(jax.ShapeDtypeStruct((rows, 8), jnp.float32))

    def distilled(w: jax.Array, data: Any) -> Any:
        target = jax.lax.stop_gradient(taught.call(data["x"]))
        return value_and_grad(squared_error)(w, {"x": data["x"], "y": target})

    step = strand_interleave(distilled, microbatches=4, strict=True)
    found, expected = step(weights(), batch()), jax.jit(distilled)(weights(), batch())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), found, expected)
    assert step.report(weights(), batch())["strand-duplication"].outcome == CHANGED


def executables() -> int:
    gc.collect()
    return len(jax.devices("cpu")[0].client.live_executables())


def test_what_is_not_called_is_let_go() -> None:
    """On a GPU, a known program takes memory for its code, constants and recorded graphs."""

    def taken(step: InterleavedStep) -> int:
        before = executables()
        jax.block_until_ready(step(*arguments))
        return executables() - before

    gc.freeze()  # objects of earlier tests, which would make each collection slow
    arguments = weights(), batch()
    strand_interleave(train_step, microbatches=4, verify=True)(*arguments)  # all steps share the programs that compare
    assert taken(strand_interleave(train_step, microbatches=4)) == 1
    verified = strand_interleave(train_step, microbatches=4, verify=True)
    assert taken(verified) == 1
    sessions = len(registration._sessions)
    del verified
    gc.collect()
    assert len(registration._sessions) < sessions
