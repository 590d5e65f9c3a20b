"""Steps predicted by the evaluator beside steps that were measured; without a GPU.

    python benchmarks/evaluated_steps.py benchmarks/results/strands_h200x4_m16.json --out benchmarks/results

Reads what `benchmarks/strands.py` has written, compiles the same programs for H200s with the card's kernels, and plays
them with measured costs (`passes/evaluation/timeline.py`). Orders that our own schedulers made are made again, on the
compiled module.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule
from dhelix.passes.strands.activation_sharing import ActivationSharing
from dhelix.passes.strands.gradients.gradient_accumulation import GradientAccumulation
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.passes.strands.strand_lockstep import StrandLockstep

# variant of strands.py -> (whether strands run, whether XLA hides latency, whether the list schedule follows)
VARIANTS = {
    "plain": (False, True, False),
    "plain, no latency hiding": (False, False, False),
    "plain, list schedule": (False, True, True),
    "strands": (True, True, False),
    "strands, list schedule": (True, True, True),
}
STRUCTURE = (StrandDuplication(), StrandLockstep(), GradientAccumulation(), ActivationSharing())
# setting of strands.py -> link and setting of the profile
SETTINGS = {"copy_engine": ("nvlink", "copy-engine"), "no_p2p": ("no-p2p", "default")}


@dataclass(frozen=True)
class Row:
    """Milliseconds; `hidden`: share of the collectives' time under compute, predicted and in a trace of GPU 0."""

    setting: str
    program: str
    predicted_ms: float
    measured_ms: float
    predicted_hidden: float
    measured_hidden: float

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.measured_ms


def compiled(arguments: dict[str, Any], strands: bool, latency_hiding: bool) -> HloModule:
    from dhelix.runtime.compiler import deviceless, tuned

    deviceless.prepare_environment()
    import jax
    import optax

    from dhelix import strand_interleave
    from dhelix.models import preset
    from dhelix.models.parallel import make_mesh
    from dhelix.models.train_step import make_train_step
    from dhelix.runtime.compiler import lowering

    sizes = {name: arguments[name] for name in ("layers", "seq", "vocab")}
    mesh = make_mesh(1, arguments["tp"], deviceless.topology("h200", f"1x1x{arguments['tp']}").devices)
    count = arguments["microbatches"]
    training = make_train_step(preset(arguments["preset"], **sizes), mesh, optax.adamw(1e-4), microbatches=count)
    step: Any = jax.jit(training.train_step, donate_argnums=0)
    if strands:
        step = strand_interleave(training.train_step, passes=STRUCTURE, strict=True, donate_argnums=0)
    lowered = step.lower(training.abstract_state(), training.abstract_batch(count))
    options = {"xla_gpu_enable_latency_hiding_scheduler": latency_hiding}
    return lowering.compiled_module(tuned.compile(lowered, **options))


def rows_of(record: dict[str, Any]) -> list[Row]:
    """Predictions for those of a record's results whose program is known."""
    programs: dict[tuple[bool, bool], HloModule] = {}
    rows = []
    for result in record["results"]:
        if result["variant"] not in VARIANTS:
            continue
        strands, latency_hiding, listed = VARIANTS[result["variant"]]
        if (strands, latency_hiding) not in programs:
            programs[strands, latency_hiding] = compiled(record["arguments"], strands, latency_hiding)
        module = programs[strands, latency_hiding]
        link, setting = SETTINGS.get(result["setting"], ("nvlink", result["setting"]))
        model = CostModel.find("H200", link, setting)
        if listed:
            source = module.to_bytes()
            passes = PassManager([CollectiveSchedule(model.hardware)], strict=True)
            module = HloModule.from_bytes(passes.run(Stage.POST_SCHEDULER, source)[0] or source)
        timeline = simulate_module(module, model.hardware, model.costs())
        hidden = timeline.hidden / timeline.communication
        seconds = 1e3 * timeline.seconds
        measured = result["median_ms"], hidden, result["hidden_share"]
        rows.append(Row(result["setting"], result["variant"], seconds, *measured))
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| setting | program | predicted ms | measured ms | ratio | hidden, predicted / measured |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.setting} | {r.program} | {r.predicted_ms:.1f} | {r.measured_ms:.1f} | {r.ratio:.3f} "
            f"| {r.predicted_hidden:.0%} / {r.measured_hidden:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="+", help="results of strands.py")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    arguments = parser.parse_args()
    rows = [row for path in arguments.measured for row in rows_of(json.loads(path.read_text()))]
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = [asdict(row) | {"ratio": row.ratio} for row in rows]
    (arguments.out / "evaluated_steps_h200.json").write_text(json.dumps(results, indent=1) + "\n")
    (arguments.out / "evaluated_steps_h200.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
