"""Random programs: every edit keeps them well formed, and keeps their results and effects."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dhelix.passes import jax_compat
from dhelix.passes.hlo import HloModule, WhileLoop, graph, verify
from dhelix.passes.hlo.edit import copy_computation, drop_dead, inline_calls
from dhelix.tests.passes.hlo.interpreter import Trace, Value, run, same
from dhelix.tests.passes.hlo.modules import programs

ARGUMENT = np.array([1, -2, 3, 1 << 30], np.int32)
quick = settings(max_examples=50)


def behaviour(module: HloModule) -> tuple[Value, Trace]:
    return run(module.entry, [ARGUMENT])


def unchanged(module: HloModule, before: tuple[Value, Trace]) -> None:
    """Checks that the module is well formed for `verify` and XLA, also after a round trip, and behaves as `before`."""
    again = HloModule.from_bytes(module.to_bytes())
    verify(module)
    verify(again)
    jax_compat.hlo_text(again.to_bytes())
    for one in (module, again):
        value, trace = behaviour(one)
        assert same(value, before[0])
        assert trace == before[1]


@quick
@given(programs())
def test_a_program_survives_being_written_and_read(module: HloModule) -> None:
    unchanged(module, behaviour(module))
    written = module.to_bytes()
    assert HloModule.from_bytes(written).to_bytes() == written
    assert module.clone().to_bytes() == written


@quick
@given(programs())
def test_inlining_keeps_values_and_effects(module: HloModule) -> None:
    before = behaviour(module)
    calls = sum(i.opcode == "call" for i in graph.walk(module.entry, into=lambda i: i.opcode == "call"))
    assert inline_calls(module.entry) == calls
    assert not any(i.opcode == "call" for i in module.entry.instructions)
    unchanged(module, before)


@quick
@given(programs())
def test_dead_code_goes_and_effects_stay(module: HloModule) -> None:
    before = behaviour(module)
    for computation in module.computations:
        drop_dead(computation)
    unchanged(module, before)
    for computation in module.computations:
        assert drop_dead(computation) == 0


@quick
@given(programs(), st.randoms(use_true_random=False))
def test_sorting_mends_any_order(module: HloModule, shuffle: random.Random) -> None:
    before = behaviour(module)[0]
    for computation in module.computations:
        shuffle.shuffle(computation.instructions)
    shuffle.shuffle(module.computations)
    module.to_bytes()
    verify(module)
    assert same(behaviour(module)[0], before)


@quick
@given(programs())
def test_a_copy_behaves_like_the_original(module: HloModule) -> None:
    before = behaviour(module)
    module.entry = copy_computation(module.entry)
    unchanged(module, before)


@quick
@given(programs())
def test_proved_trip_counts_are_what_runs(module: HloModule) -> None:
    for loop in (i for i in graph.walk(module.entry) if i.opcode == "while"):
        view = WhileLoop(loop)
        assert view.trip_count is not None
        counters = range(view.trip_count + 1)
        goes_on = [bool(run(view.condition, [(np.int32(k), ARGUMENT)])[0]) for k in counters]
        assert goes_on == [True] * view.trip_count + [False]
