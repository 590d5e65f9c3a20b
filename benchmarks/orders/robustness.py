"""Simulates orders with other costs than the ones with which the orders were made.

Evaluates the layer bodies of `optimality.py` in XLA's order, the list schedule's and strand pairing's. The orders stay
fixed; the times of their instructions differ from the profile's:

    collectives     all take longer or shorter by one factor: a slower link, or late peers
    noise           each instruction's time changes by its own random fraction; mean of 12 draws

An order that waits for collectives, or packs them closely, could then lose its predicted gain.

    python benchmarks/orders/robustness.py --out benchmarks/results
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dhelix.benchmarks.orders.optimality import CASES, compiled, layer_body
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.ordering.collective_schedule import list_order
from dhelix.passes.ordering.order_rules import MEMORY_SLACK, Limits
from dhelix.passes.ordering.strand_pairing import pairing_order

DRAWS = 12


@dataclass(frozen=True)
class Change:
    """A change of costs.

    Attributes:
      collectives: factor on the times of collectives.
      noise: largest random fraction by which the time of each instruction also changes.
    """

    collectives: float = 1.0
    noise: float = 0.0

    @property
    def name(self) -> str:
        noise = f"noise {self.noise:.0%}" if self.noise else ""
        collectives = f"collectives x {self.collectives:g}" if self.collectives != 1.0 else ""
        return ", ".join(filter(None, (collectives, noise))) or "as in the profile"


CHANGES = (
    Change(), Change(0.9), Change(1.15), Change(1.3), Change(noise=0.1), Change(noise=0.2), Change(1.15, 0.2),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Microseconds of a body under one change."""

    preset: str
    link: str
    setting: str
    change: str
    xla_us: float
    list_us: float
    paired_us: float


def changed(costs: Costs, sequence: Sequence[Instruction], change: Change, seed: int) -> Costs:
    """`costs`, with the times of `sequence` changed in place."""
    draw = random.Random(seed)
    for instruction in sequence:
        cost = costs[instruction]
        factor = 1.0 if cost.lane is Lane.COMPUTE else change.collectives
        factor *= 1.0 + draw.uniform(-change.noise, change.noise)
        costs[instruction] = replace(cost, seconds=factor * cost.seconds)
    return costs


def study(preset: str, module: HloModule, link: str, setting: str) -> Iterator[Row]:
    model = CostModel.find("H200", link, setting)
    costs, memory = model.costs(), Memory(module)
    computation = layer_body(module, costs)
    sequence = module.schedule[computation]
    limits = Limits(model.hardware, int(memory.peak(computation, sequence) * (1.0 + MEMORY_SLACK)), memory)
    orders = sequence, *(make(computation, sequence, costs, limits) for make in (list_order, pairing_order))
    for change in CHANGES:
        draws = [changed(model.costs(), sequence, change, seed) for seed in range(DRAWS if change.noise else 1)]
        times = [1e6 * statistics.mean(evaluate(order, drawn).seconds for drawn in draws) for order in orders]
        yield Row(preset, link, setting, change.name, *times)


def table(rows: Sequence[Row]) -> str:
    """A line per body: speed-up of strand pairing's order over the list schedule's (in parentheses: over XLA's)."""
    names = list(dict.fromkeys(row.change for row in rows))
    lines = [f"| body | link, setting | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for body in dict.fromkeys((row.preset, row.link, row.setting) for row in rows):
        of_body = [row for row in rows if (row.preset, row.link, row.setting) == body]
        gains = [f"{r.list_us / r.paired_us - 1:.1%} ({r.xla_us / r.paired_us - 1:.1%})" for r in of_body]
        lines.append(f"| {body[0]} | {body[1]}, {body[2]} | {' | '.join(gains)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["llama-8b", "llama-25b"])
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for preset in arguments.presets:
        module = compiled(preset, layers=4, microbatches=4)
        for link, setting in CASES:
            rows += study(preset, module, link, setting)
    record = {"draws": DRAWS, "results": [asdict(row) for row in rows]}
    (arguments.out / "order_robustness_h200.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
