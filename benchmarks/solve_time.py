"""How long strand pairing takes where layers are unrolled, and with how many instructions it grows; without a GPU.

    python benchmarks/solve_time.py --layers 2 8 32 128 --out benchmarks/results

A step of Llama-8B shapes (TP 4) whose layers are written out one behind the other is compiled for H200s, and the pass
runs over what XLA has scheduled, as it does inside of the compiler. Seconds are processor time of one core, all of the
pass: costs, DP, search, memory, checks. The layers' body in a loop is `optimality.py`'s.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dhelix.passes.costs import CostModel
from dhelix.passes.hlo import HloModule
from dhelix.passes.manager import PassContext, Stage
from dhelix.passes.strand_pairing import StrandPairing

NAME = "solve_time_h200"


@dataclass(frozen=True)
class Row:
    """`scheduled` instructions have a place in an order; `instructions` are those inside of fusions, too."""

    layers: int
    scheduled: int
    instructions: int
    compile_seconds: float
    pass_seconds: float


def scheduled_step(layers: int, seq: int) -> tuple[bytes, float]:
    """The interleaved step as XLA hands it to the pass, serialized, and the seconds that its compilation takes."""
    from dhelix.runtime import deviceless, registration

    deviceless.prepare_environment()
    import optax

    from dhelix import strand_interleave
    from dhelix.models import preset
    from dhelix.models.parallel import make_mesh
    from dhelix.models.train_step import make_train_step
    from dhelix.runtime.schedules import default_passes

    mesh = make_mesh(1, 4, deviceless.topology("h200", "1x1x4").devices)
    config = preset("llama-8b", layers=layers, seq=seq, scan_layers=False)
    training = make_train_step(config, mesh, optax.adamw(1e-4), microbatches=4)
    step = strand_interleave(training.train_step, passes=default_passes("xla"), strict=True, donate_argnums=0)
    lowered: Any = step.lower(training.abstract_state(), training.abstract_batch(4))
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
        "| layers | instructions in the schedule | fusions' too | pass, s | ms for 1,000 | compile, s |",
        "|---" * 6 + "|",
    ]
    for r in rows:
        per_thousand = 1e6 * r.pass_seconds / r.scheduled
        counts = f"{r.layers} | {r.scheduled:,} | {r.instructions:,}"
        lines.append(f"| {counts} | {r.pass_seconds:.1f} | {per_thousand:.0f} | {r.compile_seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32, 128])
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
