"""Settings of a plan's collectives in a decorated step, from compilation to the answers that NCCL gets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.hlo import HloModule
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.passes.plans.tuned_collectives import identities
from dhelix.passes.tuning.collective_settings import CollectiveSettings, TunedCollective
from dhelix.passes.tuning.launch_order import Question, sequences
from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.runtime.compiler import deviceless, lowering, registration
from dhelix.runtime.processes import agreement, rendezvous
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.runtime.tuning import in_effect, plugin, tune_step
from dhelix.runtime.tuning.plugin import Plugin
from dhelix.tests.runtime import steps
from dhelix.tests.runtime.tuning.nccl import USUAL, Chosen, Communicator

TARGET = PlanTarget.of("H200", "nvlink", "default", 2)
UNSET = Chosen(*USUAL)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(in_effect, "_tables", {})
    monkeypatch.setattr(in_effect, "nccl_version", lambda: "2.28.9")
    monkeypatch.setenv(plugin.VARIABLE, "")
    yield
    registration.clear()
    plugin.install().load("")


def step(**options: Any) -> tuple[InterleavedStep, tuple[Any, ...]]:
    # NCCL is not asked about small all-reduces, which XLA's own kernels run by default.
    compiler_options = {**deviceless.COMPILER_OPTIONS, "xla_gpu_experimental_use_collective_kernels": ""}
    return steps.of_two_layers(deviceless.mesh({"dp": 2}), compiler_options=compiler_options, strict=True, **options)


def compiled(made: tuple[InterleavedStep, tuple[Any, ...]]) -> HloModule:
    program: jax.stages.Compiled = made[0]._compiled(made[1], {})[1]
    return lowering.compiled_module(program)


@pytest.fixture(scope="module")
def module() -> HloModule:
    return compiled(step())


@pytest.fixture
def plan(module: HloModule) -> Plan:
    """Every collective of the step has another number of channels."""
    rows = (
        TunedCollective(*identity, NcclSetting("ring", "simple", channels))
        for channels, identity in enumerate(dict.fromkeys(identities(module, TARGET).values()), 1)
    )
    return Plan("a step", TARGET, tuning=CollectiveSettings("2.28", 2, tuple(rows), 1100.0, 1000.0))


def channels_of(plan: Plan, module: HloModule, questions: list[Question]) -> list[int]:
    assert plan.tuning is not None
    wanted = {one.identity: one.setting.channels for one in plan.tuning.collectives}
    names = identities(module, TARGET)
    return [wanted[names[one.instruction]] for one in questions]


@pytest.mark.deviceless
def test_each_collective_of_a_step_gets_its_setting(plan: Plan, module: HloModule, tmp_path: Path) -> None:
    plan_files.save(plan, tmp_path / "plan.json")
    made = step(tuning=tmp_path / "plan.json")
    compiled(made)
    ((_, questions),) = sequences(module).items()
    assert len(questions) > 2
    nccl = Communicator(plugin.install().path)
    for _ in range(2):
        answers = [nccl.ask(one.kind, one.bytes) for one in questions]
    assert [one.channels for one in answers] == channels_of(plan, module, questions)
    report = made[0].report(*made[1])
    count = len(plan.tuning.collectives) if plan.tuning else 0
    assert f"{count} collectives have the plan's settings under NCCL; 1.100 x as fast" in report.settings
    assert report.settings in str(report)


@pytest.mark.deviceless
def test_a_plan_of_settings_alone_orders_nothing(plan: Plan) -> None:
    made, _ = step(plan=plan)
    assert made.options.plan is None and made.options.tuning is plan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda section: replace(section, nccl="2.27"), "tuned under NCCL 2.27, and this is 2.28.9"),
        (lambda section: replace(section, devices=4), "tuned on 4 GPUs, and the step runs on 2"),
        (
            lambda section: replace(
                section, collectives=tuple(replace(c, key=f"no {c.key}") for c in section.collectives)
            ),
            "so it is another step",
        ),
    ],
)
def test_settings_that_do_not_fit_leave_nccls_defaults(
    plan: Plan,
    module: HloModule,
    change: Callable[[CollectiveSettings], CollectiveSettings],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert plan.tuning is not None
    found = in_effect.apply("step", "step 1", replace(plan, tuning=change(plan.tuning)), module, None)
    assert not found.works and said in found.said and "run on NCCL's defaults" in found.said
    assert sum(said in record.getMessage() for record in caplog.records) == 1
    first = next(iter(sequences(module).values()))[0]
    assert Communicator(plugin.install().path).ask(first.kind, first.bytes) == UNSET


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({0: "no compiler"}, "no compiler"),
        ({1: "another table"}, "would set them differently"),
    ],
)
def test_if_one_process_cannot_none_does(
    plan: Plan, module: HloModule, other: dict[int, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(purpose: str, text: str, job: object) -> list[str]:
        here = json.loads(text)
        return [text, json.dumps([other.get(n, value) for n, value in enumerate(here)])]

    monkeypatch.setattr(agreement, "gathered", gathered)
    found = in_effect.apply("step", "step 1", plan, module, None)
    assert not found.works and said in found.said


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (True, True, ""),
        (True, False, "in process 1 of 2, NCCL made its communicators before the step was decorated"),
        (False, True, "in process 0 of 2, NCCL made its communicators before the step was decorated"),
        (False, False, "NCCL made its communicators before the step was decorated"),
    ],
)
def test_a_job_has_settings_from_the_second_call_on_in_all_processes_or_in_none(
    plan: Plan,
    module: HloModule,
    here: bool,
    there: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process whose NCCL made a communicator before the step was decorated shows only after a call."""
    uses = [False, False]
    monkeypatch.setattr(in_effect, "_uses_plugin", lambda: uses[0])

    def gathered(purpose: str, text: str, job: object) -> list[str]:
        told = json.loads(text)
        return [text, json.dumps(uses[1] if isinstance(told, bool) else [*told[:2], uses[1]])]

    monkeypatch.setattr(agreement, "gathered", gathered)
    first = next(iter(sequences(module).values()))[0]
    nccl = Communicator(plugin.install().path)
    found = in_effect.apply("step", "step 1", plan, module, None)
    found.before_call()
    assert nccl.ask(first.kind, first.bytes) == UNSET and "from the second call on" in found.said
    uses[:] = here, there
    for _ in range(3):
        found.before_call()
    assert found.works == (here and there) == (nccl.ask(first.kind, first.bytes) != UNSET)
    messages = [r.getMessage() for r in caplog.records if "NCCL's defaults" in r.getMessage()]
    assert len(messages) == (not found.works) and all(said in text for text in [*messages, found.said])


def test_a_step_of_only_some_processes_has_no_settings(
    plan: Plan, module: HloModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise these processes would look into tables that the others of a shared communicator do not have."""
    monkeypatch.setattr(rendezvous, "everyone", lambda: SimpleNamespace(processes=(0, 1)))
    found = in_effect.apply("step", "step 1", plan, module, None)
    assert not found.works and "only some processes of the job run the step" in found.said


def test_all_programs_of_a_step_keep_their_settings(
    plan: Plan, module: HloModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, channels in ((512, 3), (1024, 5)):
        monkeypatch.setattr(in_effect, "_table", lambda *_: (f"sequence\n1 2 {size} 1 2 {channels} 0", 1, 1))  # noqa: B023
        assert in_effect.apply("step", "step 1", plan, module, None).works
    nccl = Communicator(plugin.install().path)
    assert [nccl.ask("all-gather", size).channels for size in (512, 1024)] == [3, 5]


def test_an_unexpected_error_leaves_nccls_defaults(
    plan: Plan, module: HloModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a groove")

    monkeypatch.setattr(in_effect, "settings_of", broken)
    found = in_effect.apply("step", "step 1", plan, module, None)
    assert not found.works and "a groove" in found.said


def test_if_nccls_defaults_were_fastest_this_is_said_and_not_that_the_step_is_another(
    plan: Plan, module: HloModule, caplog: pytest.LogCaptureFixture
) -> None:
    assert plan.tuning is not None
    nothing = replace(plan, tuning=replace(plan.tuning, collectives=()))
    found = in_effect.apply("step", "step 1", nothing, module, None)
    assert "fastest when they were tuned" in found.said and not caplog.records


def test_a_step_without_gpus_or_left_alone_says_that_settings_have_no_effect(
    plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    double = strand_interleave(lambda x: 2 * x, tuning=plan)
    double(jnp.ones(2))
    (said,) = [r.getMessage() for r in caplog.records if "sets those of steps that it changes" in r.getMessage()]
    assert double.report(jnp.ones(2)).settings in said
    on_cpu = strand_interleave(lambda x: 3 * x, tuning=plan, passes=())
    for _ in range(2):
        on_cpu(jnp.ones(2))
    assert "does not run on GPUs" in on_cpu.report(jnp.ones(2)).settings


def test_that_nccl_does_not_use_the_plugin_is_said_once(
    plan: Plan, module: HloModule, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = in_effect.apply("step", "step 1", plan, module, None)
    monkeypatch.setattr(Plugin, "counts", lambda _: plugin.Counts(0, 0, 0, 0, 0))
    for _ in range(50):
        found.before_call()
    (record,) = [r for r in caplog.records if "made its communicators before" in r.getMessage()]
    assert "NCCL's defaults" in record.getMessage() and not found.works


def test_a_plan_without_settings_is_refused_as_tuning() -> None:
    with pytest.raises(DhelixError, match="no settings of collectives"):
        step(tuning=Plan("a step", TARGET))


def test_without_a_compiler_the_step_is_decorated_and_says_so(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler() -> Plugin:
        raise plugin.TunerError("settings of collectives need a C compiler")

    monkeypatch.setattr(plugin, "_of_process", no_compiler)
    step(tuning=plan)
    assert [r for r in caplog.records if "defaults: settings of collectives need a C compiler" in r.getMessage()]
    monkeypatch.undo()


def test_under_a_policy_that_a_plugin_replaces_only_settings_install_it(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert plan.tuning is not None
    monkeypatch.setenv("NCCL_CTA_POLICY", "1")
    in_effect.prepare(replace(plan, tuning=replace(plan.tuning, collectives=())))
    assert not os.environ[plugin.VARIABLE] and not caplog.records
    in_effect.prepare(plan)
    assert os.environ[plugin.VARIABLE]
    assert [r for r in caplog.records if "NCCL_CTA_POLICY=1 has no effect beside the plan" in r.getMessage()]
    with pytest.raises(plugin.TunerError, match="nothing can be compared with NCCL's own choice"):
        tune_step.prepare()
