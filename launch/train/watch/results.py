"""Speed and results of a training run: tokens per second, MFU, the gain over plain steps, and everything as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from dhelix.launch.train.generation import Generated
from dhelix.launch.train.loop import Run, Step
from dhelix.launch.train.options import Options
from dhelix.passes.framework.units import milliseconds
from dhelix.profiles import hardware
from dhelix.runtime.step import options as step_options

_LATEST = 20  # steps whose median is the speed


def step_seconds(steps: Sequence[Step]) -> float:
    """The median step time. The first step does not count unless it is the only one, because it compiles."""
    timed = [step.seconds for step in steps[1:] if not step.plain]
    return statistics.median(timed or [step.seconds for step in steps[-1:]])


def utilization(run: Run, seconds: float) -> float | None:
    """MFU of a step that takes `seconds`: the model's FLOPs divided by the peak FLOPs of all devices in that time.

    Attention counts in full, not halved for the causal mask. The result is None if the peak of the devices is unknown
    and `peak_tflops` is not set.
    """
    peak = run.options.peak_tflops and run.options.peak_tflops * 1e12
    kind = run.training.mesh.devices.flat[0].device_kind
    known = hardware.ALL.get(hardware.gpu_name(kind))
    peak = peak or (known and known.peak_flops)
    if not peak:
        return None
    flops = run.training.config.flops_per_token(run.seq) * run.tokens_per_step
    return flops / (seconds * peak * run.training.mesh.size)


def speed(run: Run, steps: Sequence[Step]) -> tuple[str, ...]:
    """Tokens per second and MFU of the latest 20 steps, in words. MFU is left out if it is unknown."""
    seconds = step_seconds(steps[-_LATEST:] if len(steps) > _LATEST else steps)
    mfu = utilization(run, seconds)
    return f"{run.tokens_per_step / seconds:,.0f} tokens/s", *([] if mfu is None else [f"MFU {mfu:.1%}"])


def time_left(run: Run, steps: Sequence[Step]) -> str:
    """How long the remaining steps take if they are as fast as the latest ones, in words."""
    seconds = step_seconds(steps[-_LATEST:]) * (run.options.steps - steps[-1].number)
    if seconds < 60:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min left"


def measured_gain(steps: Sequence[Step]) -> str | None:
    """How much faster the passes made the step, in a sentence; None if plain steps were not timed."""
    plain = [step for step in steps if step.plain][1:]  # the first one compiles
    ours = [step for step in steps[1:] if not step.plain]
    if not plain or not ours:
        return None
    new, old = (statistics.median(step.seconds for step in some) for some in (ours, plain))
    counts = f"medians of {len(plain)} and {len(ours)} steps"
    return (
        f"measured step time {milliseconds(old)} without passes -> {milliseconds(new)} ({old / new:.2f} x as fast; "
        f"{counts})"
    )


def to_json(run: Run, generated: Generated | None = None, error: BaseException | None = None) -> str:
    """All results of a run as a JSON object. Values that are not finite, which JSON lacks, are null.

    Args:
      generated: what the trained model has generated.
      error: why the run ended before its end, if it did.
    """
    said = None if error is None else " ".join((str(error) or type(error).__name__).split())
    made = None if generated is None else dataclasses.asdict(generated)
    found = results(run, run.taken) | {"generated": made, "error": said}
    return json.dumps(_finite(found), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def results(run: Run, steps: Sequence[Step]) -> dict[str, Any]:
    """All results of the steps as JSON values. The time of the first step includes the compilation."""
    seconds = step_seconds(steps) if steps else None
    report = run.report() if steps else None
    documents = run.batches.rows.documents
    return {
        "options": said(run.options),
        "model": dataclasses.asdict(run.training.config),
        "parameters": run.training.config.parameter_count,
        "devices": run.training.mesh.devices.flat[0].device_kind,
        "mesh": dict(run.training.mesh.shape),
        "data": {
            "name": documents.name,
            "documents": len(documents),
            "tokens": documents.size,
            "tokenizer": documents.tokenizer,
            "masked": run.batches.rows.masked,
            "rows": len(run.batches.rows),
        },
        "tokens_per_step": run.tokens_per_step,
        "steps": [dataclasses.asdict(step) for step in steps],
        "step_seconds": seconds,
        "tokens_per_second": seconds and run.tokens_per_step / seconds,
        "mfu": seconds and utilization(run, seconds),
        "measured_gain": measured_gain(steps),
        "passes": None if report is None else json.loads(report.to_json()),
    }


def said(options: Options) -> dict[str, Any]:
    """All options as JSON values, by the names of their flags."""
    return options.said() | {name: getattr(options.step, name) for name in step_options.flags()}
