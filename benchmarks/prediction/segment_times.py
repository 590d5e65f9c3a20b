"""Compares the evaluator's times with measured ones, by segment of a plan and kind of operator. No GPU is needed.

    python benchmarks/prediction/segment_times.py --out DIR \\
        --step copy_engine1 "strands, dp" step.hlo.pb.gz trace-folder --step ...

Each `--step` is one measured step: its setting and variant (`strands/variants.py`), the compiled module
(`compiled_module(...).to_bytes()`), and a trace. The trace is a folder of `jax.profiler.trace`, or the events of one
GPU as JSON: a list of [start in ms, duration in ms, stream, instruction, ...]. Module and JSON may be gzipped.

Times are of one run of a plan's body: a computation that the plan orders. The evaluator predicts them with the shipped
profile. A measured time is the median of all runs in the trace. An operator counts as *beside* communication if overlap
slows it down in the evaluation.
"""

import argparse
import gzip
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dhelix.benchmarks.strands.variants import GPU, SETTINGS
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.timeline import evaluate, settled
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.passes.plans.plan_making import make_plan
from dhelix.passes.plans.planned_order import find_bodies
from dhelix.profiles.keys import CollectiveKey
from dhelix.runtime.profiling.measured_plan import of_executions
from dhelix.runtime.profiling.traces import executions, trace
from dhelix.runtime.profiling.traces.executions import Event, Execution
from dhelix.runtime.profiling.traces.module_executions import by_instruction

_KINDS = {"gemm": "products", "grouped-gemm": "products", "attention": "attention", "attention-backward": "attention"}


@dataclass(frozen=True)
class Segment:
    """One segment of a plan, in microseconds. `run` names its operators in launch order."""

    setting: str
    variant: str
    number: int
    run: tuple[str, ...]
    runs: int
    predicted_us: float
    measured_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1.0


@dataclass(frozen=True)
class Kind:
    """Summed times of all operators of one kind, in one run of each body, in microseconds.

    There are three: alone, predicted in the body's order, and measured.
    """

    setting: str
    variant: str
    kind: str
    operators: int
    alone_us: float
    predicted_us: float
    measured_us: float


@dataclass(frozen=True)
class Step:
    """A step that ran. `found` holds its executions on the first GPU."""

    setting: str
    variant: str
    module: HloModule
    found: Sequence[Execution]

    @property
    def model(self) -> CostModel:
        return SETTINGS[self.setting].costs()

    @property
    def plan(self) -> Plan:
        """The plan of the executed order, with its measured times."""
        target = PlanTarget.of(GPU, self.model.profile.link, self.model.setting)
        plan = make_plan(self.module, dict(self.module.schedule), self.model, Plan(self.variant, target))
        return of_executions(plan, self.module, self.found)

    @classmethod
    def read(cls, setting: str, variant: str, module: str, recorded: str) -> "Step":
        compiled = HloModule.from_bytes(_bytes(Path(module)))
        return cls(setting, variant, compiled, _executions(Path(recorded), compiled.name))


def _bytes(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _executions(path: Path, module_name: str) -> list[Execution]:
    if path.is_dir() or path.suffix == ".pb":
        found = executions.of_trace(trace.load(path), module_name)
        return found[min(found)]
    listed = json.loads(_bytes(path))
    return executions.of_events(Event(e[0] / 1e3, (e[0] + e[1]) / 1e3, e[2], e[3]) for e in listed)


def segments_of(step: Step) -> list[Segment]:
    return [
        Segment(step.setting, step.variant, n + 1, s.run, body.runs, s.predicted_us, s.measured_us)
        for body in step.plan.bodies
        for n, s in enumerate(body.segments)
        if s.measured_us
    ]


def kinds_of(step: Step) -> list[Kind]:
    """Kinds of operators. The time that compute waits for communication and launches is a kind of its own."""
    plan, alone, times = step.plan, step.model.costs(), by_instruction(step.module, step.found)
    costs = settled(step.module, alone)
    sums: dict[str, list[tuple[float, float, float]]] = {}
    for body, computation, _ in find_bodies(plan, step.module):
        waits = [body.predicted_us, sum(s.measured_us or 0.0 for s in body.segments)]
        for instruction, predicted in _played(computation, costs):
            ran = 1e6 * statistics.median(e.seconds for e in times[instruction]) if instruction in times else 0.0
            kind = _kind(instruction, costs) + (", beside" if predicted > 1.001e6 * costs[instruction].seconds else "")
            if costs[instruction].lane is Lane.COMPUTE:
                waits = [waits[0] - predicted, waits[1] - ran]
            else:
                kind = _kind(instruction, costs)
            sums.setdefault(kind, []).append((1e6 * alone[instruction].seconds, predicted, ran))
        sums.setdefault("compute waits", []).append((0.0, *waits))
    columns = {kind: [sum(column) for column in zip(*rows, strict=True)] for kind, rows in sums.items()}
    return [Kind(step.setting, step.variant, kind, len(sums[kind]), *columns[kind]) for kind in sorted(columns)]


def _played(computation: Computation, costs: Costs) -> Iterator[tuple[Instruction, float]]:
    """Each instruction that takes time in a computation, and its microseconds in the evaluated order."""
    order = computation.module.schedule[computation]
    named = {i.name: i for i in order}
    for interval in evaluate(order, costs).intervals:
        yield named[interval.instruction], 1e6 * (interval.end - interval.start)


def _kind(instruction: Instruction, costs: Costs) -> str:
    key = costs.operator_keys[instruction]
    if isinstance(key, CollectiveKey):
        return key.kind
    return _KINDS.get(key.kind, "other compute") if key else "other compute"


def summary(found: Sequence[Segment]) -> dict[str, float]:
    errors = sorted(abs(segment.error) for segment in found)
    ninth = errors[min(int(0.9 * len(errors)), len(errors) - 1)]
    return {"segments": len(errors), "median_error": statistics.median(errors), "error_90": ninth}


def tables(found: Sequence[Segment], kinds: Sequence[Kind]) -> str:
    lines = ["| setting | order | segment | predicted µs | measured µs | error |", "|---|---|---|---|---|---|"]
    for s in found:
        what = f"{s.number}: {_short(s.run)}"
        times = f"{s.predicted_us:.0f} | {s.measured_us:.0f} | {s.error:+.1%}"
        lines.append(f"| {s.setting} | {s.variant} | {what} | {times} |")
    lines += [
        "",
        "| setting | order | operators | alone µs | predicted µs | measured µs |",
        "|---|---|---|---|---|---|",
    ]
    for k in kinds:
        times = f"{k.alone_us:.0f} | {k.predicted_us:.0f} | {k.measured_us:.0f}"
        lines.append(f"| {k.setting} | {k.variant} | {k.operators} {k.kind} | {times} |")
    return "\n".join(lines)


def _short(run: Sequence[str]) -> str:
    """Names of a segment's collectives, products and attention."""
    light = {"read", "update", "add", "multiply", "reduce", "copy"}
    return ", ".join(name for name in run if not light & set(name.split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = ("SETTING", "VARIANT", "MODULE", "TRACE")
    parser.add_argument("--step", nargs=4, action="append", required=True, metavar=what, help="may be repeated")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    arguments = parser.parse_args()
    steps = [Step.read(*step) for step in arguments.step]
    found = [segment for step in steps for segment in segments_of(step)]
    kinds = [kind for step in steps for kind in kinds_of(step)]
    record = {
        **summary(found),
        "rows": [asdict(segment) | {"error": segment.error} for segment in found],
        "kinds": [asdict(kind) for kind in kinds],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "segment_times_h200x4.json").write_text(json.dumps(record, indent=1) + "\n")
    print(tables(found, kinds))
    print({name: round(value, 4) for name, value in summary(found).items()})


if __name__ == "__main__":
    main()
