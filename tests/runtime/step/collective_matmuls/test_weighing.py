"""Sites of a step with strands that become collective matmuls, on GPUs that need not exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from dhelix.errors import DhelixError
from dhelix.models import Training, make_train_step, preset
from dhelix.passes.analysis.names import ALPHA, BETA
from dhelix.passes.communication.collective_matmul import site_choice as passes_choice
from dhelix.passes.communication.collective_matmul.collective_matmul import CollectiveMatmul, executed
from dhelix.passes.communication.collective_matmul.pattern import Pattern, Placed
from dhelix.passes.evaluation.collective_matmul_kernels import MARK
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.hlo import HloModule
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.profiles.collective_matmul import times as collective_matmul_times
from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form, Site, SiteTimes, Times
from dhelix.profiles.profile import Timing
from dhelix.runtime.compiler import deviceless, lowering, registration, scheduled_only
from dhelix.runtime.step import step_passes
from dhelix.runtime.step.collective_matmuls import weighing
from dhelix.runtime.step.collective_matmuls.jax_forms import ALONE, PAIRED, JaxForms
from dhelix.runtime.step.collective_matmuls.weighing import Weighing, predicted
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.target import Target

CONFIG = preset("llama-8b", layers=2, vocab=4096, hidden=1024, heads=8, kv_heads=4, ffn=3072, seq=2048)
QKV = Site("all_gather_matmul", 2048, 1024, 512, "bfloat16", 4)
DOWN = Site("matmul_reduce_scatter", 2048, 768, 1024, "bfloat16", 4)


def times(**ratios: float) -> Times:
    """Times of a ring at both sites, relative to the GEMM. The monolithic form is slower, so a ring may be chosen."""
    sites = {
        site: SiteTimes(Timing(1.0), Timing(1.0), {MONOLITHIC: Timing(99.0), Form("ring"): Timing(ratios[name])})
        for name, site in (("qkv", QKV), ("down", DOWN))
    }
    return Times("H200", "nvlink", sites=sites)


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DHELIX_PROFILES", str(tmp_path))
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_CTA_POLICY", "NCCL_P2P_DISABLE", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    yield
    registration.clear()


@pytest.fixture(scope="module")
def training() -> Training:
    return make_train_step(CONFIG, deviceless.mesh({"dp": 1, "tp": 4}), optax.sgd(0.1), 3)


def known(monkeypatch: pytest.MonkeyPatch, found: Times) -> None:
    monkeypatch.setattr(collective_matmul_times, "find", lambda hardware, link: found)


@pytest.mark.slow
@pytest.mark.deviceless
def test_each_site_is_decided_for_where_it_stands(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that takes 20 times as long as its GEMM is left out everywhere. A form that takes 3.5 times as long is
    taken where nothing else hides the collective. The ring's real program is no faster, which would reject it, so the
    test replaces the prediction for the real program.
    """
    known(monkeypatch, times(qkv=3.5, down=20.0))
    monkeypatch.setattr(passes_choice, "MARGIN", 0.0)  # with two layers, few bytes are gathered
    real: list[float] = []

    def recorded(*arguments: Any) -> float:
        real.append(predicted(*arguments))
        return 0.0

    monkeypatch.setattr(weighing, "predicted", recorded)
    weighed, decided = Weighing.weighed, []
    monkeypatch.setattr(Weighing, "weighed", lambda self: decided.append(weighed(self)) or decided[0])
    lowered = jax.jit(training.train_step, donate_argnums=0).lower(
        training.abstract_state(), training.abstract_batch(3)
    )
    options = StepOptions(schedule="list", collective_matmul="auto")
    target = Target.of(lowered, options)
    paired = step_passes.weighed(options, target, lowered, 1 << 40)
    (found,) = decided
    sites = [[(p.pattern.site, p.co_executed) for p in part] for part in (found.taken, paired)]
    assert sites == [[(QKV, False)], [(QKV, True), (DOWN, False), (DOWN, True)]]
    assert found.seconds < real[0] < 2 * found.seconds and found.checked(real[0]).taken == ()
    settled = step_passes.pass_manager(options, target, lowered, 1 << 40, paired)
    assert strands_beside_matmuls(lowered, settled) == [{ALPHA}], "in the first forward pass"


def strands_beside_matmuls(lowered: jax.stages.Lowered, passes: PassManager) -> list[set[str]]:
    """For each computation of the scheduled step that holds collective matmuls: the strands that run in it."""
    source = passes.run(Stage.LOWERED, lowering.hlo_bytes(lowered))[0]
    assert source is not None
    scheduled = scheduled_only.scheduled(lowered, source, "test", lambda one: passes.run(Stage.PRE_SCHEDULER, one)[0])
    assert scheduled is not None
    module = HloModule.from_bytes(scheduled)
    names = [[i.op_name for i in computation.instructions] for computation in executed(module.entry)]
    return [
        {strand for strand in (ALPHA, BETA) if any(f"{strand}/" in name for name in one)}
        for one in names
        if any(f"/{MARK}/" in name for name in one)
    ]


def test_why_a_site_stays_depends_on_where_it_stands() -> None:
    pattern = Pattern(QKV, 1, (1024,), (512,), False, False, (1, 4, 1))
    both, one = Placed(pattern, True), Placed(pattern, False)
    devices = list(deviceless.mesh({"tp": 4}).devices.flat)
    for stays, other, reason in ((both, one, PAIRED), (one, both, ALONE)):
        forms = JaxForms(Form("ring"), None, False, devices, (stays,))
        with pytest.raises(DhelixError, match=f"^{reason}$"):
            forms.choose(stays)
        assert forms.choose(other) == Form("ring")


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "options",
    [{"schedule": "xla"}, {"schedule": "intra_batch"}, {"profile": None}, {"collective_matmul": "ring"}],
    ids=str,
)
def test_elsewhere_the_form_that_is_faster_alone_is_taken(
    training: Training, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    known(monkeypatch, times(qkv=0.1, down=20.0))
    lowered = jax.jit(training.train_step).lower(training.abstract_state(), training.abstract_batch(3))
    chosen = StepOptions(**{"collective_matmul": "auto", **options})
    assert step_passes.weighed(chosen, Target.of(lowered, chosen), lowered, None) == ()


@pytest.mark.deviceless
def test_a_plan_has_its_collectives_where_they_are(training: Training) -> None:
    lowered = jax.jit(training.train_step).lower(training.abstract_state(), training.abstract_batch(3))
    plan = Plan("a step", PlanTarget.of("H200", "nvlink", "default"))
    options = StepOptions(plan=plan, collective_matmul="auto")
    target = Target.of(lowered, options)
    assert step_passes.weighed(options, target, lowered, None) == ()
    assert CollectiveMatmul.name not in [one.name for one in step_passes.pass_manager(options, target, lowered).passes]


@pytest.mark.deviceless
def test_what_cannot_be_predicted_stops_no_job(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def weighed(self: Weighing) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Weighing, "weighed", weighed)
    lowered = jax.jit(training.train_step).lower(training.abstract_state(), training.abstract_batch(3))
    options = StepOptions(collective_matmul="auto")
    target = Target.of(lowered, options)
    assert step_passes.weighed(options, target, lowered, None) == ()
    assert "by their own times, without a prediction of the step: a mistake" in caplog.text
    with pytest.raises(RuntimeError, match="a mistake"):
        step_passes.weighed(options.but(strict=True), target, lowered, None)
