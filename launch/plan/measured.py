"""`dhelix plan PLAN --trace DIR`: shows measured times of a plan's segments next to the predicted times.

    dhelix train --plan plan.json --trace traces ...
    dhelix plan plan.json --trace traces --out measured.json

The trace contains the program, so the command needs neither a GPU nor the code of the step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dhelix.launch.plan import tables as plan_tables
from dhelix.launch.shown.progress import say
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import PlanBody
from dhelix.runtime.profiling import measured_plan
from dhelix.runtime.profiling.measured_plan import Measured


def run(plan: str, folder: str, out: str | None, as_json: bool, console: Console) -> None:
    """Reads a plan and a trace of a run with this plan, and prints the predicted and the measured times.

    Args:
      plan: the plan's file.
      folder: folder of the trace.
      out: file to which the plan with its measured times is written, or None.
      as_json: whether to print JSON instead of tables.

    Raises:
      DhelixError: the plan or the trace cannot be used.
    """
    measured = measured_plan.of_trace(plan_files.load(plan), folder)
    if out:
        plan_files.save(measured.plan, out)
    if as_json:
        print(json.dumps(_json(measured), indent=1))
    else:
        _print(measured, console)


def _json(measured: Measured) -> dict[str, Any]:
    """All results as JSON values, times in microseconds.

    The times in `bodies` are those of one run of the body. All others are those of one step.
    """
    plan, report, steps = measured.plan, measured.report, measured.steps
    return {
        "program": plan.program,
        "device": report.device,
        "steps": steps,
        "in_order": measured.in_order,
        "predicted": {
            "makespan_us": round(plan.predicted.makespan_us, 2),
            "communication_us": round(plan.predicted.communication_us, 2),
            "hidden_fraction": round(plan.predicted.hidden_fraction, 6),
        },
        "measured": {
            "makespan_us": round(1e3 * report.span_ms / steps, 2),
            "communication_us": round(1e3 * report.communication_ms / steps, 2),
            "hidden_fraction": round(report.hidden_share, 6),
        },
        "bodies": [_body_json(body) for body in plan.bodies],
    }


def _print(measured: Measured, console: Console) -> None:
    plan, report, steps = measured.plan, measured.report, measured.steps
    say(console, f"{plan.program}; {steps} step{'s' * (steps > 1)} on {report.device.removeprefix('/device:')}.")
    if not measured.in_order:
        say(console, 
            "The step did not run in the plan's order, so the times of segments mean little. If the job used this "
            "plan, its log says why the plan was refused.")  # fmt: skip
    table = Table(title="One step", title_justify="left", title_style="bold")
    for column in ("", "whole", "communication", "hidden"):
        table.add_column(column, justify="right" if column else "left")
    predicted = plan.predicted
    times = ((predicted.makespan_us, predicted.communication_us, predicted.hidden_fraction),
             (1e3 * report.span_ms / steps, 1e3 * report.communication_ms / steps, report.hidden_share))  # fmt: skip
    for name, (whole, communication, hidden) in zip(("predicted", "measured"), times, strict=True):
        table.add_row(name, f"{whole / 1e3:,.1f} ms", f"{communication / 1e3:,.1f} ms", f"{hidden:.0%}")
    console.print(table)
    for body in plan.bodies:
        if _taken(body):
            console.print(plan_tables.segments(body))
    missing = [body.name for body in plan.bodies if not _taken(body)]
    if missing:
        say(console, f"Not in the trace: {', '.join(missing)}.")
    errors = [error for body in plan.bodies for error in _errors(body)]
    say(
        console,
        f"Predicted times of {len(errors)} segments differ from measured ones by {statistics.median(errors):.1%} in "
        "the median.",
    )


def _body_json(body: PlanBody) -> dict[str, Any]:
    return {
        "name": body.name,
        "runs": body.runs,
        "predicted_us": round(body.predicted_us, 2),
        "measured_us": body.measured_us and round(body.measured_us, 2),
        "segments": [
            {"run": list(s.run), "predicted_us": s.predicted_us, "measured_us": s.measured_us} for s in body.segments
        ],
    }


def _taken(body: PlanBody) -> bool:
    return any(segment.measured_us is not None for segment in body.segments)


def _errors(body: PlanBody) -> Sequence[float]:
    """The relative errors of the predicted times, for each segment with a measured time."""
    return [abs(s.predicted_us - s.measured_us) / s.measured_us for s in body.segments if s.measured_us]
