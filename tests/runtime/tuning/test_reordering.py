"""Ordering a step anew for its tuned collectives: the order itself, and the rounds of ordering and tuning."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.passes.communication import exchange
from dhelix.passes.framework.report import CHANGED
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import CollectivesSection, Plan, PlanTarget
from dhelix.passes.plans.tuned_collectives import identities
from dhelix.passes.tuning.collective_settings import CollectiveSettings, TunedCollective
from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.runtime.compiler import deviceless, lowering
from dhelix.runtime.processes.launch_settings import NO_GRAPHS
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.runtime.tuning import in_effect, plugin, tune_step
from dhelix.runtime.tuning.bodies import Body, BodyTimes
from dhelix.runtime.tuning.reordering import MOST, Reordering, collectives_of, repeated
from dhelix.runtime.tuning.step_search import DEFAULTS, TUNED, StepSettings
from dhelix.runtime.tuning.tune_step import Tuning
from dhelix.runtime.tuning.tuned import Start, Tuned
from dhelix.tests.runtime.tuning.simulated_step import SimulatedStep

TARGET = PlanTarget.of("H200", "nvlink", "default", 2)
PLAN = Plan("a step", TARGET)
WIDTH = 2048


class Scaled(SimulatedStep):
    """A step that takes `factor` times as long."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.key, self._factor_of_all = f"a program of {factor}", factor

    def times(self, bodies: Sequence[Body], settings: StepSettings) -> Mapping[str, BodyTimes]:
        found = super().times(bodies, settings)
        return {name: replace(one, whole=self._factor_of_all * one.whole) for name, one in found.items()}

    def bodies(self) -> tuple[Body, ...]:
        found = super().bodies()
        return tuple(replace(b, default=replace(b.default, whole=self._factor_of_all * b.default.whole)) for b in found)

    def seconds(self, settings: StepSettings) -> float:
        return self._factor_of_all * super().seconds(settings)


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Tuned:
    monkeypatch.setattr(tune_step, "nccl_version", lambda: "2.30.1")
    return tuned(1.0)


def tuned(factor: float, start: Start | None = None) -> Tuned:
    return Tuning(Scaled(factor), PLAN, lambda _: None, time.monotonic(), 10.0).run(None, None, start)


def after(first: Tuned, factors: Iterable[float], moved: Collection[str] | None = None) -> Tuned:
    """Rounds in which the step takes these times, relative to the first one's."""
    left = iter(factors)
    bodies = [body.fingerprint for body in first.bodies] if moved is None else moved

    def reorder(plan: Plan) -> tuple[Plan, Collection[str]]:
        return replace(plan, program=f"{plan.program}, ordered"), bodies

    def again(plan: Plan, best: Tuned, changed: Collection[str]) -> Tuned:
        found = tuned(next(left), Start(best.settings, changed, best.alone))
        return replace(found, plan=replace(plan, tuning=found.plan.tuning))

    return repeated(first, reorder, again, lambda: False, lambda _: None)


def test_rounds_go_on_while_the_step_gains(first: Tuned) -> None:
    found = after(first, [0.9, 0.8, 0.8])
    assert [one.kept for one in found.iterations] == [True, True, True, False]
    assert found.best == pytest.approx(0.8 * first.best, rel=0.02) and found.seconds[TUNED] == found.best
    assert found.seconds[DEFAULTS] == first.seconds[DEFAULTS]
    assert found.plan.program == "a step, ordered, ordered"
    assert found.plan.tuning is not None and first.plan.tuning is not None
    assert found.plan.tuning.default_us == first.plan.tuning.default_us
    assert str(found.iterations[3]).endswith("which gains nothing more") and str(found.iterations[1]) in str(found)


def test_there_are_at_most_three_new_orders(first: Tuned) -> None:
    assert len(after(first, [0.9**n for n in range(1, 10)]).iterations) == 1 + MOST == 4


def test_an_order_that_gains_nothing_is_not_kept(first: Tuned) -> None:
    found = after(first, [1.0])
    assert found.plan == first.plan and found.seconds == first.seconds and len(found.iterations) == 2


def test_if_the_order_cannot_change_this_is_said_and_the_settings_stay(first: Tuned) -> None:
    def reorder(plan: Plan) -> tuple[Plan, Collection[str]]:
        raise DhelixError("nothing was measured on these GPUs")

    nothing: Any = None
    found = repeated(first, reorder, nothing, lambda: False, lambda _: None)
    assert found.plan == first.plan and "the order of round 1 stays: nothing was measured" in str(found)
    assert after(first, [], moved=()).plan == first.plan
    late = repeated(first, reorder, nothing, lambda: True, lambda _: None)
    assert "the time is over" in str(late) and len(late.iterations) == 1


def test_a_later_round_searches_only_what_has_moved(first: Tuned) -> None:
    one, other = (body.fingerprint for body in first.bodies)
    again = tuned(1.0, Start(first.settings, [one], first.alone))
    assert again.found.measured < first.found.measured / 3
    assert again.best <= 1.01 * first.best
    kept = {identity: setting for identity, setting in first.settings.items() if identity[0] == other}
    assert kept.items() <= again.found.candidates[TUNED].items()


def test_settings_have_their_times_in_the_plan(first: Tuned) -> None:
    assert first.plan.tuning is not None and first.plan.tuning.collectives
    assert all(row.us > 0.0 and row.default_us > 0.0 for row in first.plan.tuning.collectives)
    assert any(row.slows != 1.0 for row in first.plan.tuning.collectives)
    assert plan_files.loads(plan_files.dumps(first.plan), "here") == first.plan


# ---- The order of a compiled step ----


def compiled_step(sharded_rows: bool = False, **options: Any) -> tuple[InterleavedStep, tuple[Any, ...]]:
    """Two layers of two products over tensor-parallel GPUs, with an all-reduce after each layer.

    With `sharded_rows`, an all-gather precedes the products, and a reduce-scatter follows.
    """
    mesh = deviceless.mesh({"tp": 2})

    def rows(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec))) if sharded_rows else x

    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            return x + rows(jnp.tanh(rows(x) @ w["up"]) @ w["down"], "tp"), None

        return jnp.mean(jax.lax.scan(layer, rows(x, "tp"), w)[0].astype(jnp.float32) ** 2)

    def train_step(w: dict[str, jax.Array], x: jax.Array) -> Any:
        value, gradients = value_and_grad(loss)(w, x)
        return jax.tree.map(jnp.subtract, w, gradients), value

    def weights(*spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, WIDTH, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    batch = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    made = strand_interleave(
        train_step,
        microbatches=4,
        donate_argnums=0,
        compiler_options={**deviceless.COMPILER_OPTIONS, "xla_gpu_experimental_use_collective_kernels": ""},
        **options,
    )
    return made, ({"up": weights(None, None, "tp"), "down": weights(None, "tp", None)}, batch)


def settings_of(step: InterleavedStep, arguments: tuple[Any, ...], ratio: float) -> Plan:
    """A plan in which all collectives take `ratio` times as long as under NCCL's defaults, and slow nothing down."""
    module = lowering.compiled_module(step.lower(*arguments).compile(dict(NO_GRAPHS)))
    names = dict.fromkeys(identities(module, TARGET).values())
    rows = (TunedCollective(*name, NcclSetting("ring", "simple", 2), 100.0 * ratio, 100.0, 0.0) for name in names)
    return replace(PLAN, tuning=CollectiveSettings("2.28", 2, tuple(rows), 1100.0, 1000.0))


@pytest.mark.deviceless
def test_a_step_runs_in_the_order_that_is_best_for_its_tuned_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    step, arguments = compiled_step(strict=True)
    plan = settings_of(step, arguments, 8.0)
    assert plan.tuning is not None
    reordering = Reordering(step, arguments, plan, lambda _: None)
    found, moved = reordering.ordered(plan)
    assert moved and {body.fingerprint for body in found.bodies} >= set(moved) and found.tuning == plan.tuning
    assert reordering.ordered(found)[1] == []  # which is the order that it already has
    ordered = reordering.step(plan_files.loads(plan_files.dumps(found), "here"))
    module = lowering.compiled_module(ordered.lower(*arguments).compile(dict(NO_GRAPHS)))
    assert set(identities(module, TARGET).values()) == {row.identity for row in plan.tuning.collectives}
    assert ordered.report(*arguments)["planned-order"].outcome == CHANGED
    # Training takes the order and the settings from the same plan.
    monkeypatch.setenv(plugin.VARIABLE, "")
    monkeypatch.setattr(in_effect, "_tables", {})
    monkeypatch.setattr(in_effect, "nccl_version", lambda: "2.28.9")
    report = compiled_step(plan=found, strict=True)[0].report(*arguments)
    plugin.install().load("")
    assert report["planned-order"].outcome == CHANGED
    assert f"{len(plan.tuning.collectives)} collectives have the plan's settings" in report.settings


@pytest.mark.slow
@pytest.mark.deviceless
def test_what_passes_have_replaced_by_costs_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr(exchange, "why_too_dear", lambda *_: "")  # costs that say yes
    step, arguments = compiled_step(strict=True, sharded_rows=True)
    own = collectives_of(step.report(*arguments))
    assert [(key.kind, key.bytes) for key in own.decomposed] == [("all-gather", 8 << 20)]
    plan = settings_of(step, arguments, 0.5)
    reordering = Reordering(step, arguments, plan, lambda _: None)
    assert [form.collectives for form in reordering._structures] == [own, CollectivesSection()]
    found, _ = reordering.ordered(plan)
    times = [
        reordering._seconds(reordering._ordered(plan.tuning, form), plan.tuning) for form in reordering._structures
    ]
    assert found.collectives == [own, CollectivesSection()][times.index(min(times))]
    for form in reordering._structures:
        made = reordering._ordered(plan.tuning, form)
        ordered = reordering.step(replace(made, order=replace(made.order, memory_limit=1 << 40)))
        assert collectives_of(ordered.report(*arguments)) == form.collectives
        reordering.check(ordered)


@pytest.mark.deviceless
def test_why_an_order_stays_is_one_line() -> None:
    step, arguments = compiled_step(schedule="xla")
    with pytest.raises(DhelixError, match="the step's schedule searches no order"):
        Reordering(step, arguments, PLAN, lambda _: None).ordered(PLAN)
    unmeasured, arguments = compiled_step(profile=None, strict=True)
    plan = settings_of(unmeasured, arguments, 8.0)
    with pytest.raises(DhelixError, match="nothing was measured on these GPUs"):
        Reordering(unmeasured, arguments, plan, lambda _: None).ordered(plan)
