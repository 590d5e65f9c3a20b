"""Computes how far the orders of a layer body are from the optimum, in simulated time. No GPU is needed.

    python benchmarks/orders/optimality.py --out benchmarks/results

A layer body is the loop body that holds the layers of both strands. It is compiled for H200s, with the kernels tuned
for that GPU. The shapes are Llama-8B's and 25B's (sequence 8192, TP 4). Each body is simulated under each launch
setting with measured costs, in five orders:

    XLA       XLA's own order
    list      the order of the list schedule
    paired    the order of strand pairing
    longer    the better of `paired` and of a search by strand pairing that is too long for a pass
    exact     the order of the exact model, whose solver starts from `longer`

No order is faster than the exact model's lower bound. The gap of an order is 1 - bound / time. A loose bound may cause
part of it. `pairing_seconds` is the processor time of strand pairing.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.collectives import is_start
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.ordering.collective_schedule import list_order
from dhelix.passes.ordering.exact.order import exact_order
from dhelix.passes.ordering.order_rules import MEMORY_SLACK, Limits
from dhelix.passes.ordering.order_search import OrderSearch
from dhelix.passes.ordering.strand_pairing import pairing_order
from dhelix.passes.ordering.strand_sequences import find_strands

CASES = [
    *(("nvlink", setting) for setting in ("default", "connections1", "copy-engine", "copy-engine1")),
    *(("no-p2p", setting) for setting in ("default", "small-buffers")),
]


@dataclass(frozen=True)
class Row:
    """One body under one launch setting. Times of orders are simulated, in microseconds."""

    preset: str
    link: str
    setting: str
    compute_us: float
    collectives_us: float
    xla_us: float
    list_us: float
    paired_us: float
    long_us: float
    exact_us: float
    bound_us: float
    solved: bool
    pairing_seconds: float

    @property
    def gap(self) -> float:
        """Gap of strand pairing's order: 1 - bound / time."""
        return 1.0 - self.bound_us / self.paired_us

    @property
    def body(self) -> tuple[Any, ...]:
        """Identifies a body: its names, and times that do not depend on our searches."""
        times = (round(us, 3) for us in (self.compute_us, self.collectives_us, self.xla_us))
        return self.preset, self.link, self.setting, *times

    @property
    def best_gap(self) -> float:
        """Gap of the best known order: 1 - bound / time."""
        return 1.0 - self.bound_us / self.exact_us


def compiled(preset_name: str, layers: int, microbatches: int) -> HloModule:
    """The compiled interleaved step, for 4 H200s that need not exist."""
    from dhelix.runtime.compiler import lowering, tuned

    return lowering.compiled_module(tuned.compile(lowered_step(preset_name, microbatches, layers=layers)))


def lowered_step(preset_name: str, microbatches: int, **model: Any) -> Any:
    """The lowered interleaved step, before XLA compiles and schedules it.

    Args:
      model: options of `models.preset`.
    """
    from dhelix.runtime.compiler import deviceless

    deviceless.prepare_environment()
    import optax

    from dhelix import strand_interleave
    from dhelix.models import preset
    from dhelix.models.common.mesh import make_mesh
    from dhelix.models.train_step import make_train_step
    from dhelix.runtime.step.pass_lists import strand_passes

    mesh = make_mesh(1, 4, deviceless.topology("h200", "1x1x4").devices)
    config = preset(preset_name, **{"seq": 8192, **model})
    training = make_train_step(config, mesh, optax.adamw(1e-4), microbatches=microbatches)
    structure = strand_passes()  # no ordering passes: XLA schedules the step
    step = strand_interleave(training.train_step, passes=structure, strict=True, donate_argnums=0)
    return step.lower(training.abstract_state(), training.abstract_batch(microbatches))


def layer_body(module: HloModule, costs: Costs) -> Computation:
    """The computation with the most asynchronous collectives. It holds the layers of both strands."""

    def collectives(computation: Computation) -> int:
        return sum(is_start(i) and costs[i].lane is not Lane.COMPUTE for i in computation.instructions)

    return max(module.schedule, key=lambda c: (collectives(c), c.name))


def study(
    preset: str, module: HloModule, link: str, setting: str, effort: float, work: int, known: Sequence[Row] = ()
) -> Row:
    """Evaluates all orders of one body.

    Args:
      effort: deterministic time of the exact solver.
      work: work that the longer search may do.
      known: earlier rows. A bound depends only on the body and its costs, so an equal body reuses it.
    """
    model = CostModel.find("H200", link, setting)
    costs, memory = model.costs(), Memory(module)
    computation = layer_body(module, costs)
    sequence = module.schedule[computation]
    limits = Limits(model.hardware, int(memory.peak(computation, sequence) * (1.0 + MEMORY_SLACK)), memory)
    listed = list_order(computation, sequence, costs, limits)
    begin = time.process_time()
    paired = pairing_order(computation, sequence, costs, limits)
    pairing_seconds = time.process_time() - begin
    searched = long_search(computation, paired, costs, limits, work)
    longer = min(paired, searched, key=lambda order: evaluate(order, costs).seconds)
    xla_us, list_us, paired_us, long_us = (1e6 * evaluate(o, costs).seconds for o in (sequence, listed, paired, longer))
    compute_us = 1e6 * sum(costs[i].seconds for i in sequence if costs[i].lane is Lane.COMPUTE)
    collectives_us = 1e6 * sum(costs[i].seconds for i in sequence) - compute_us
    row = Row(
        preset,
        link,
        setting,
        compute_us,
        collectives_us,
        xla_us,
        list_us,
        paired_us,
        long_us,
        exact_us=long_us,
        bound_us=0.0,
        solved=False,
        pairing_seconds=pairing_seconds,
    )
    same = next((other for other in known if other.body == row.body), None)
    if same is not None:
        return replace(row, exact_us=min(same.exact_us, long_us), bound_us=same.bound_us, solved=same.solved)
    exact = exact_order(computation, sequence, costs, limits, longer, effort)
    return replace(row, exact_us=1e6 * exact.seconds, bound_us=1e6 * exact.bound, solved=exact.solved)


def long_search(
    computation: Computation, order: Sequence[Instruction], costs: Costs, limits: Limits, work: int
) -> list[Instruction]:
    """`order`, improved by strand pairing's search. `work` limits the search (`OrderTiming.work`)."""
    body = find_strands(computation, computation.module.schedule[computation], costs, limits)
    search = OrderSearch(body, costs, limits)
    number = {head: n for n, head in enumerate(body.heads)}
    start = tuple(number[i] for i in order if i in number)
    return search.sequence(search.improve((search.seconds(start), start), work))


def table(rows: list[Row]) -> str:
    lines = [
        "| body | link, setting | compute / collectives alone us | XLA | list | paired | searched longer | best known "
        "| bound | gap of paired | gap of best known | paired takes |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        orders = (r.xla_us, r.list_us, r.paired_us, r.long_us, r.exact_us, r.bound_us)
        times = " | ".join(f"{t:.0f}" for t in orders)
        lines.append(
            f"| {r.preset} | {r.link}, {r.setting} | {r.compute_us:.0f} / {r.collectives_us:.0f} | {times} "
            f"| {r.gap:.1%} | {r.best_gap:.1%} | {r.pairing_seconds:.2f} s |"
        )
    return "\n".join(lines)


def read(path: Path) -> list[Row]:
    names = {field.name for field in fields(Row)}
    return [Row(**{k: v for k, v in r.items() if k in names}) for r in json.loads(path.read_text())["results"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["llama-8b", "llama-25b"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--effort", type=float, default=180.0, help="CP-SAT's deterministic time per body")
    parser.add_argument("--work", type=int, default=400_000, help="of the longer search (OrderTiming.work)")
    parser.add_argument(
        "--bounds", type=Path, help="results of before, whose bounds count for bodies that are the same"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = read(arguments.bounds) if arguments.bounds else []
    rows: list[Row] = []
    for preset in arguments.presets:
        module = compiled(preset, arguments.layers, arguments.microbatches)
        for link, setting in CASES:
            rows.append(study(preset, module, link, setting, arguments.effort, arguments.work, known))
            print(json.dumps(asdict(rows[-1])), flush=True)
            results = [asdict(r) | {"gap": r.gap, "best_gap": r.best_gap} for r in rows]
            record = {"effort": arguments.effort, "work": arguments.work, "results": results}
            (arguments.out / "optimality_h200.json").write_text(json.dumps(record, indent=1) + "\n")
            (arguments.out / "optimality_h200.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
