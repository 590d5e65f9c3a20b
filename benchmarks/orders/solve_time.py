"""How long strand pairing takes on unrolled layers, and how this grows with the number of instructions; without a GPU.

    python benchmarks/orders/solve_time.py --layers 2 8 32 64 --out benchmarks/results

Compiles a step of Llama-8B shapes (TP 4) with unrolled layers for H200s. The pass `StrandPairing` then runs on XLA's
schedule, as inside the compiler. Seconds are processor time of the whole pass on one core: costs, DP, search, memory,
checks. `optimality.py` covers layers in a loop.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dhelix.benchmarks.orders.optimality import lowered_step
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.strand_pairing import StrandPairing

NAME = "solve_time_h200"


@dataclass(frozen=True)
class Row:
    """`scheduled` counts instructions with a place in the schedule. `instructions` also counts those inside fusions."""

    layers: int
    scheduled: int
    instructions: int
    compile_seconds: float
    pass_seconds: float


def scheduled_step(layers: int, seq: int) -> tuple[bytes, float]:
    """The serialized interleaved step, as XLA hands it to the pass, and the seconds of its compilation."""
    from dhelix.runtime.compiler import deviceless, registration

    lowered = lowered_step("llama-8b", 4, layers=layers, seq=seq, scan_layers=False)
    modules: dict[Stage, bytes] = {}
    begin = time.perf_counter()
    with registration.temporary_hook(modules.__setitem__, "jit_train_step"):
        deviceless.compile(lowered)
    return modules[Stage.POST_SCHEDULER], time.perf_counter() - begin


def study(layers: int, seq: int, model: CostModel) -> Row:
    serialized, compile_seconds = scheduled_step(layers, seq)
    module = HloModule.from_bytes(serialized)
    scheduled = sum(map(len, module.schedule.values()))
    instructions = sum(len(computation.instructions) for computation in module.computations)
    begin = time.process_time()
    StrandPairing(model=model).run(module, PassContext(strict=True))
    return Row(layers, scheduled, instructions, compile_seconds, time.process_time() - begin)


def table(rows: list[Row]) -> str:
    lines = [
        "| layers | instructions in the schedule | with those inside of fusions | pass, s | compile, s |",
        "|---" * 5 + "|",
    ]
    for r in rows:
        counts = f"{r.layers} | {r.scheduled:,} | {r.instructions:,}"
        lines.append(f"| {counts} | {r.pass_seconds:.1f} | {r.compile_seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--seq", type=int, default=2048, help="short enough that XLA needs not recompute anything")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    arguments = parser.parse_args()
    model = CostModel.find("H200", "nvlink", "connections1")
    model.costs()  # reads the profile
    rows = [study(layers, arguments.seq, model) for layers in arguments.layers]
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"seq": arguments.seq, "results": [asdict(row) for row in rows]}
    (arguments.out / f"{NAME}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
