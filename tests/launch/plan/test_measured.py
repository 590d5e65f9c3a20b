"""`dhelix plan PLAN --trace DIR` compares a plan with the trace of the step that carried it out. No GPU is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dhelix.launch import cli
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.passes.plans.plan_making import make_plan
from dhelix.profiles.profile import Profile, Section
from dhelix.tests.passes import strand_module
from dhelix.tests.runtime.profiling import recorded_traces as traces

MODEL = CostModel(Profile("H200", "no-p2p").with_section(Section("default")))
STRETCHED = 1.25

RunPlan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> RunPlan:
    """Runs `dhelix plan`; returns status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err  # type: ignore[return-value]

    return run


@pytest.fixture
def ran(tmp_path: Path) -> tuple[Path, Path]:
    """A plan's file, and the folder of a trace of its step. Each kernel takes `STRETCHED` times its predicted time."""
    module = HloModule.from_text(strand_module.text())
    original = dict(module.schedule)
    StrandPairing(model=MODEL, memory_slack=1.0).run(module, PassContext())
    made = make_plan(module, original, MODEL, Plan("two strands", PlanTarget.of("H200", "no-p2p", "default")))
    file, folder = tmp_path / "plan.json", tmp_path / "traces" / "plugins"
    plan_files.save(made, file)
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(traces.serialized({0: _kernels(module)}, [module]))
    return file, tmp_path / "traces"


def _kernels(module: HloModule) -> list[traces.Kernel]:
    intervals = evaluate(module.schedule[module.entry], MODEL.costs()).intervals
    micro = STRETCHED * 1e6
    return [
        traces.kernel(1 + ("gather" in i.instruction), micro * i.start, micro * i.end, i.instruction, module.name)
        for i in intervals
    ]


def test_what_segments_took_stands_beside_what_was_predicted(
    ran: tuple[Path, Path], plan: RunPlan, tmp_path: Path
) -> None:
    status, text, _ = plan(ran[0], f"--trace={ran[1]}", f"--out={tmp_path / 'measured.json'}")
    assert status == 0
    assert "1 step on GPU:0" in text
    assert "differ from measured ones by 20.0% in the median" in text  # measured times are 1.25 times as long
    written = plan_files.load(tmp_path / "measured.json")
    (body,) = written.bodies
    assert body.measured_us == pytest.approx(STRETCHED * body.predicted_us, rel=0.01)
    assert f"{body.measured_us:,.0f} µs" in text
    assert body.order == plan_files.load(ran[0]).bodies[0].order  # the written plan can still be edited and run


def test_another_order_than_the_plans_is_told(ran: tuple[Path, Path], plan: RunPlan) -> None:
    assert "another order" not in plan(ran[0], f"--trace={ran[1]}")[1]
    made = plan_files.load(ran[0])
    segments = made.bodies[0].segments
    other = replace(made.bodies[0], segments=tuple(reversed(segments)))
    plan_files.save(made.with_body(other), ran[0])
    assert "The step did not run in the plan's order" in plan(ran[0], f"--trace={ran[1]}")[1]
    assert not json.loads(plan(ran[0], f"--trace={ran[1]}", "--json")[1])["in_order"]


def test_json(ran: tuple[Path, Path], plan: RunPlan) -> None:
    status, text, _ = plan(ran[0], f"--trace={ran[1]}", "--json")
    found: dict[str, Any] = json.loads(text)
    assert status == 0
    assert found["steps"] == 1
    (body,) = found["bodies"]
    assert sum(s["measured_us"] for s in body["segments"]) == pytest.approx(body["measured_us"], abs=0.1)
    assert found["measured"]["makespan_us"] == pytest.approx(STRETCHED * body["predicted_us"], rel=0.01)
    assert found["measured"]["hidden_fraction"] == pytest.approx(found["predicted"]["hidden_fraction"], abs=0.02)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--preset=llama-demo",), "a plan that ran"),
        (("--picture=a.png",), "draws nothing"),
    ],
)
def test_what_does_not_go_together(ran: tuple[Path, Path], plan: RunPlan, flags: tuple[str, ...], said: str) -> None:
    status, _, errors = plan(ran[0], f"--trace={ran[1]}", *flags)
    assert status != 0
    assert said in errors


def test_no_trace_there(ran: tuple[Path, Path], plan: RunPlan, tmp_path: Path) -> None:
    status, _, errors = plan(ran[0], f"--trace={tmp_path / 'elsewhere'}")
    assert status != 0
    assert "no such file or folder" in errors


def test_a_folder_without_traces_is_told_from_none(ran: tuple[Path, Path], plan: RunPlan, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    _, _, errors = plan(ran[0], f"--trace={tmp_path / 'empty'}")
    assert "holds no *.xplane.pb file" in errors
