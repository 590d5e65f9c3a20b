"""Programs that nobody decorated, in this process: they train as before, and steps among them become strands."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.passes import jax_compat
from dhelix.runtime.step import specialization
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.runtime.undecorated.catch import Catch
from dhelix.runtime.undecorated.policy import Policy
from dhelix.runtime.undecorated.seen import CHANGED, FAILED, LEFT_ALONE
from dhelix.tests.runtime import steps
from dhelix.tests.runtime.undecorated import trainers

type Catching = Callable[..., Catch]


@pytest.fixture
def catching() -> Iterator[Catching]:
    made: list[Catch] = []

    def catch(**policy: Any) -> Catch:
        made.append(Catch(Policy(**policy)))
        return made[-1]

    yield catch
    for one in reversed(made):
        one.undo()


SLOW = ("filtered_jit", "nnx_in_place")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in trainers.TRAINERS]


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_trains_the_same_and_its_step_is_interleaved(name: str, catching: Catching) -> None:
    plain = trainers.TRAINERS[name]()
    catch = catching()
    assert trainers.TRAINERS[name]() == plain
    changed = [one for one in catch.seen if one.outcome == CHANGED]
    assert changed and "two strands over 3 layers, 4 micro-batches" in changed[0].why[0]
    assert all(one.outcome == CHANGED for one in catch.seen)
    assert f"{len(changed)} of {len(catch.seen) + catch.others} programs" in catch.report()


LOWERED_TWICE = """
from dhelix.runtime.undecorated import catch, policy
from dhelix.tests.runtime.undecorated import trainers

made = catch.install(policy.Policy(quiet=True))
trainers.ahead_of_time(calls_jitted=True)
print([one.outcome for one in made.seen])
"""


def test_a_step_that_is_lowered_twice_is_compiled_once() -> None:
    # A process of its own, because imports in the midst of a compilation may change what JAX keeps.
    done = subprocess.run([sys.executable, "-c", LOWERED_TWICE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([CHANGED])


def test_shardings_that_are_spelled_otherwise_get_the_changed_program() -> None:
    mesh, offered, compiled = trainers._mesh(data=8), [], []

    def change(lowered: jax.stages.Lowered) -> jax_compat.Changed:
        offered.append(lowered)
        jax_compat.mark_known(lowered)
        compiled.append(lowered.compile())
        return lowered, compiled[-1]

    double = jax.jit(lambda x: 2.0 * x + 1.0)
    xs = [jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec)) for spec in (P("data"), P("data", None))]
    undo = jax_compat.catch_compilations(change)
    try:
        executables = [double.lower(x).compile() for x in xs]
    finally:
        undo()
    assert len(offered) == 1
    assert len({id(one.runtime_executable()) for one in (*executables, *compiled)}) == 1
    assert [one.input_shardings[0][0].spec for one in executables] == [x.sharding.spec for x in xs]


def test_what_is_remembered_of_a_program_goes_with_it() -> None:
    offered: list[Any] = []
    undo = jax_compat.catch_compilations(lambda lowered: offered.append(weakref.ref(lowered.compiler_ir())))
    jax.jit(lambda x: x * 3)(jnp.ones(4))
    undo()
    jax.clear_caches()
    gc.collect()
    assert offered and not any(module() for module in offered)


def test_accumulation_across_calls_is_recognized(catching: Catching) -> None:
    plain = trainers.across_calls()
    catch = catching()
    assert trainers.across_calls() == plain
    (left, *_) = catch.seen
    assert left.outcome == LEFT_ALONE
    assert "optax.MultiSteps accumulates gradients across calls: leave it out, and give all" in left.why[0]
    assert "microbatches=" not in left.why[0]  # which is advice for decorated steps
    assert "jit_step" in catch.report() and "left alone" in catch.report()


def test_programs_without_a_step_compile_from_the_same_bytes(
    catching: Catching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What JAX compiles is the same object with the same content before and after dhelix has looked at it."""
    mesh = trainers._mesh(data=8)
    original, looked = Catch._change, []

    def change(self: Catch, lowered: jax.stages.Lowered) -> Any:
        module, before = jax_compat.stablehlo_module(lowered), jax_compat.debug_text(lowered)
        assert original(self, lowered) is None
        assert jax_compat.stablehlo_module(lowered) is module and jax_compat.debug_text(lowered) == before
        looked.append(before)
        return None

    monkeypatch.setattr(Catch, "_change", change)
    catch = catching()
    x = jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, P("data")))
    jax.jit(lambda x: jnp.sum(jnp.tanh(x @ x.T)))(x).block_until_ready()
    jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x.T))))(x).block_until_ready()
    jax.jit(jax.grad(lambda x: jnp.sum(x**3)))(jnp.ones(4)).block_until_ready()
    assert [one.outcome for one in catch.seen] == [LEFT_ALONE] and catch.others >= 2 and len(looked) >= 3


def test_a_decorated_step_is_not_changed_twice(catching: Catching) -> None:
    catch = catching()
    step, state, batch = steps.STEPS["plain_pytree"]()
    decorated = strand_interleave(step, microbatches=2)
    decorated(state, batch)
    assert decorated.report(state, batch)["strand-duplication"].changed and not catch.seen
    alone = strand_interleave(step, passes=())
    alone(state, batch)
    assert not catch.seen


@pytest.mark.parametrize(
    ("policy", "changed"),
    [
        ({"only": ("train_*",)}, True),
        ({"only": ("step",)}, False),
        ({"skip": ("train_step",)}, False),
        ({"only": ("*",), "skip": ("eval",)}, True),
    ],
)
def test_names_choose_programs(policy: dict[str, Any], changed: bool, catching: Catching) -> None:
    catch = catching(**policy)
    trainers.ahead_of_time()
    (found,) = catch.seen
    assert found.outcome == (CHANGED if changed else LEFT_ALONE)
    assert changed or found.why == ("the options of dhelix run leave it out",)


def test_options_reach_the_passes(catching: Catching) -> None:
    catch = catching(options={"schedule": "xla"}, functions={"train_*": {"max_in_flight": 1}})
    trainers.ahead_of_time()
    assert catch.seen[0].outcome == FAILED and "schedule='xla' cannot keep to max_in_flight" in catch.seen[0].why[0]


def test_a_pass_that_is_switched_off_does_not_run(catching: Catching) -> None:
    catch = catching(options={"disable": ["strand-duplication"]})
    trainers.ahead_of_time()
    assert catch.seen[0].outcome == LEFT_ALONE


def test_whatever_fails_in_dhelix_the_program_goes_on(catching: Catching, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room\nfor this")

    monkeypatch.setattr(specialization, "Specialization", fails)
    plain = trainers.ahead_of_time()
    catch = catching()
    assert trainers.ahead_of_time() == plain
    (found,) = catch.seen
    assert (found.outcome, found.why) == (FAILED, ("MemoryError: no room for this",))


def test_dhelix_off_leaves_everything_alone(catching: Catching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DHELIX", "off")
    catch = catching()
    trainers.ahead_of_time()
    (found,) = catch.seen
    assert found.outcome == LEFT_ALONE and found.why == ("dhelix is switched off by DHELIX=off",)
