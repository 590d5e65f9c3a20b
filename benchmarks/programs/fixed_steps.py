"""Compiles twenty fixed steps and prints digests of the programs, to show that a refactoring changes no program.

    python benchmarks/programs/fixed_steps.py --out before.json      # then change the code
    python benchmarks/programs/fixed_steps.py --against before.json  # status 1 and a line for each that differs

Steps are compiled for H200s that this machine does not have. A step has three digests: of the program after the passes
of stage LOWERED, of the compiled program in its order, and of the compiled order as a plan that is written and read
again. The first two leave out text that does not affect the computation (metadata, and dhelix's marker in names).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from dhelix.runtime.compiler import deviceless

deviceless.prepare_environment()

import jax  # noqa: E402

from dhelix.launch.profile import step as profile_step  # noqa: E402
from dhelix.launch.train import trainer  # noqa: E402
from dhelix.passes.evaluation.costs import CostModel  # noqa: E402
from dhelix.passes.hlo import HloModule  # noqa: E402
from dhelix.passes.plans import plan_files  # noqa: E402
from dhelix.passes.plans.plan import Plan, PlanTarget  # noqa: E402
from dhelix.passes.plans.plan_making import make_plan  # noqa: E402
from dhelix.runtime.compiler import lowering  # noqa: E402
from dhelix.runtime.step.options import StepOptions  # noqa: E402

_SMALL = {"preset": "llama-demo", "layers": 4, "seq": 128, "batch": 16, "microbatches": 4, "dtype": "bfloat16"}
_LARGE = {"preset": "llama-8b", "layers": 2, "microbatches": 4}
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the step, and options of the decorator
    "tp": ({**_SMALL, "mesh": "dp=1,tp=2"}, {}),
    "tp, list": ({**_SMALL, "mesh": "dp=1,tp=2"}, {"schedule": "list"}),
    "tp, xla": ({**_SMALL, "mesh": "dp=1,tp=2"}, {"schedule": "xla"}),
    "tp, a layer apart": ({**_SMALL, "mesh": "dp=1,tp=2"}, {"skew": 1}),
    "tp, one in flight": ({**_SMALL, "mesh": "dp=1,tp=2"}, {"max_in_flight": 1}),
    "tp, no profile": ({**_SMALL, "mesh": "dp=1,tp=2"}, {"profile": None}),
    "tp, three micro-batches": ({**_SMALL, "microbatches": 3, "batch": 12, "mesh": "dp=1,tp=2"}, {}),
    "tp, remat": ({**_SMALL, "remat": "full", "mesh": "dp=1,tp=2"}, {}),
    "tp, float32": ({**_SMALL, "dtype": "float32", "mesh": "dp=1,tp=2"}, {}),
    "dp and tp": ({**_SMALL, "mesh": "dp=2,tp=2"}, {}),
    "dp": ({**_SMALL, "mesh": "dp=4,tp=1"}, {}),
    "dp, auto": ({**_SMALL, "mesh": "dp=4,tp=1", "sharding": "auto"}, {}),
    "dp and tp, auto": ({**_SMALL, "mesh": "dp=2,tp=2", "sharding": "auto"}, {}),
    "fsdp": ({**_SMALL, "mesh": "dp=4,tp=1", "sharding": "fsdp"}, {}),
    "fsdp and tp": ({**_SMALL, "mesh": "dp=2,tp=2", "sharding": "fsdp"}, {}),
    "collective matmuls": ({**_SMALL, "mesh": "dp=1,tp=4"}, {"collective_matmul": "auto"}),
    "pipeline": ({**_SMALL, "pp": 2, "mesh": "dp=1,tp=2"}, {}),
    "pipeline, interleaved SI": ({**_SMALL, "pp": 2, "mesh": "dp=1,tp=2", "pipeline": "interleaved_si"}, {}),
    "8B, tp": ({**_LARGE, "mesh": "dp=1,tp=4"}, {}),
    "8B, fsdp": ({**_LARGE, "seq": 4096, "mesh": "dp=4,tp=1", "sharding": "fsdp"}, {}),
}


MODEL = CostModel.find("H200", "nvlink", "default")
_LEFT_OUT = (  # the marker, source positions, and values that depend on them or on the process (callback addresses)
    r"__dhelix_[0-9a-f]{16}",
    r", metadata=\{[^}]*\}",
    r", stack_frame_id=\d+",
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*",
    r'fingerprint_before_lhs="[^"]*"',
    r'(?<=custom_call_target="CustomSPMDPartitioning").*',
)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="write digests to this file")
    made.add_argument("--against", type=Path, help="digests to compare with")
    arguments = made.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found = {name: digests(*STEPS[name]) for name in STEPS}
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.against:
        before = json.loads(arguments.against.read_text())
        different = [name for name in STEPS if before.get(name, {}).items() - found[name].items() or name not in before]
        for name in different:
            print(f"{name}: {before.get(name)} -> {found[name]}")
        print(f"{len(STEPS) - len(different)} of {len(STEPS)} steps are as before")
        sys.exit(bool(different))


def digests(options: dict[str, Any], interleaving: dict[str, Any]) -> dict[str, str]:
    """The digests of one step: after the passes of stage LOWERED, compiled, and as a plan."""
    chosen = trainer.Options(**options)
    training, batch = profile_step.deviceless_training(chosen, "h200")
    step: Any = trainer.make_step(training, False, StepOptions(**interleaving))
    lowered = step.lower(training.abstract_state(), training.abstract_batch(batch))
    compiled = lowering.compiled_module(deviceless.compile(lowered))
    lowered_digest = _digest(HloModule.from_bytes(lowering.hlo_bytes(lowered)))
    return {"lowered": lowered_digest, "compiled": _digest(compiled), "plan": _plan(compiled)}


def _plan(compiled: HloModule) -> str:
    """The digest of the compiled order as a plan, after it was written and read. Exits if reading changes the plan."""
    like = Plan("a step", PlanTarget.of(MODEL.profile.hardware, MODEL.profile.link, MODEL.setting))
    made = make_plan(compiled, dict(compiled.schedule), MODEL, like)
    read = plan_files.loads(plan_files.dumps(made), "the plan")
    rounded = plan_files.loads(plan_files.dumps(read), "the plan")
    if (read.target, read.collectives, [b.order for b in read.bodies]) != (
        made.target, made.collectives, [b.order for b in made.bodies]
    ) or rounded != read:  # fmt: skip
        raise SystemExit("a plan is another one after reading")
    told = repr([(b.fingerprint, b.runs, b.operators, b.order, b.small) for b in read.bodies])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _digest(module: HloModule) -> str:
    """The digest of a module's instructions in their order, without metadata."""
    text = str(module.to_text())
    for left_out in _LEFT_OUT:
        text = re.sub(left_out, "", text, flags=re.MULTILINE)
    # XLA's partitioner lists pairs in an order that changes from run to run.
    text = re.sub(r"source_target_pairs=\{[^=]*?\}\}", lambda m: str(sorted(re.findall(r"\d+,\d+", m[0]))), text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
