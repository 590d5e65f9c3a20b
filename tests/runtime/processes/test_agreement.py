"""A job of one process agrees with itself. Two processes compare the order of a compiled step's collectives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dhelix.passes.framework.fingerprint import collective_fingerprint, collective_order
from dhelix.passes.framework.manager import PassManager
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.processes import agreement, first_run
from dhelix.runtime.processes.records import Entry
from dhelix.tests.runtime.processes.job_steps import two_collectives


def compiled_step(gather_first: bool) -> jax.stages.Compiled:
    return jax.jit(two_collectives(gather_first)).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()


def test_a_single_process_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "compiled_module", lambda _: pytest.fail("not needed"))
    assert first_run.check_order("step", compiled_step(True), "marker", None) is None
    lowered = jax.jit(lambda x: x).lower(1.0)
    first_run.check_choice("step", lowered, PassManager([]), None, None, None)
    agreement.check("agree", [Entry("inputs", "x")])
    assert agreement.largest("compare", 5) == 5
    assert agreement.gathered("compare", "what it says") == ["what it says"]
    with pytest.raises(ZeroDivisionError):
        agreement.together("divide", lambda: 1 / 0, (ValueError,))


def test_order_of_a_compiled_step() -> None:
    first, second, again = (compiled_module(compiled_step(gather_first)) for gather_first in (True, False, True))
    assert [line.split()[0] for line in collective_order(first)] == ["all-gather", "collective-permute"]
    assert collective_fingerprint(first) == collective_fingerprint(again)
    assert collective_fingerprint(first) != collective_fingerprint(second)
