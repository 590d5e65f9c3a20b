"""Counts the collectives of a train step that collective matmuls can replace, under shard_map and automatic sharding.

    python benchmarks/collective_matmul/automatic_sharding.py --tp 2,4
    python benchmarks/collective_matmul/automatic_sharding.py --tp 2 --predict  # also predicts the step's time

No GPU is needed (extra `compile`). The Llama-8B step is compiled for H200s up to the passes at PRE_SCHEDULER; for a
prediction, up to XLA's schedule. A site is a collective of activations next to the matrix product that it belongs to.
The count under `shard_map` is the largest possible. Under automatic sharding, XLA's partitioner writes collectives in
another form. The pass `collective-canonicalization` turns this form into the form under `shard_map`.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

_PLACES = ("layer, forward", "layer, backward", "head, forward", "head, backward")
_KINDS = ("all_gather_matmul", "matmul_reduce_scatter")
_PREDICTED: Mapping[str, Mapping[str, Any]] = {
    "its order alone": {"collective_matmul": "off"},
    "collective matmuls, not canonical": {"collective_matmul": "auto", "disable": ("collective-canonicalization",)},
    "collective matmuls": {"collective_matmul": "auto"},
}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tp", default="2,4", help="how many GPUs, separated by commas")
    made.add_argument("--predict", action="store_true", help='milliseconds of 8 layers with schedule="intra_batch"')
    arguments = made.parse_args()
    print(f"| TP | sharding | canonical | {' | '.join(_PLACES)} | all |")
    print("|---" * (4 + len(_PLACES)) + "|")
    for tp in map(int, arguments.tp.split(",")):
        for sharding in ("shard_map", "auto"):
            module = partitioned(tp, sharding)
            for canonical in (False, True):
                found = sites(module, canonical)
                counts = " | ".join(str(found[place]) for place in _PLACES)
                print(f"| {tp} | {sharding} | {'yes' if canonical else 'no'} | {counts} | {found.total()} |")
    for tp in map(int, arguments.tp.split(",") if arguments.predict else ()):
        for sharding in ("shard_map", "auto"):
            for name, options in _PREDICTED.items():
                print(f"| {tp} | {sharding} | {name} | {1e3 * predicted(tp, sharding, options):.1f} |", flush=True)


def lower(tp: int, sharding: str, layers: int, microbatches: int) -> Any:
    """Lowers the plain step for GPUs that this machine does not have, without CUDA graphs."""
    import jax

    from dhelix.launch.profile import step as profile_step
    from dhelix.launch.train import trainer
    from dhelix.runtime.processes.launch_settings import NO_GRAPHS

    options = trainer.Options("llama-8b", layers, mesh=f"tp={tp}", sharding=sharding, microbatches=microbatches)
    training, batch = profile_step.deviceless_training(options)
    step = jax.jit(training.train_step, donate_argnums=0, compiler_options=dict(NO_GRAPHS))
    return step.lower(training.abstract_state(), training.abstract_batch(batch))


def predicted(tp: int, sharding: str, options: Mapping[str, Any]) -> float:
    """Predicted seconds of a step of 8 layers and 4 micro-batches with `schedule="intra_batch"` and `options`."""
    from dhelix.runtime.processes.launch_settings import NO_GRAPHS
    from dhelix.runtime.step import step_passes
    from dhelix.runtime.step.collective_matmuls import weighing
    from dhelix.runtime.step.options import StepOptions
    from dhelix.runtime.step.target import Target

    lowered = lower(tp, sharding, 8, 4)
    chosen = StepOptions(schedule="intra_batch", compiler_options=dict(NO_GRAPHS), **options)
    target = Target.of(lowered, chosen)
    if target is None or target.model is None:
        raise SystemExit("nothing was measured on these GPUs that a prediction could rest on")
    return weighing.predicted(lowered, step_passes.pass_manager(chosen, target, lowered), target.model)


def partitioned(tp: int, sharding: str) -> bytes:
    """The module that dhelix's passes of stage PRE_SCHEDULER receive, for two layers and two micro-batches."""
    from dhelix.runtime.compiler import scheduled_only
    from dhelix.runtime.compiler.lowering import hlo_bytes

    lowered = lower(tp, sharding, 2, 2)
    found: list[bytes] = []
    scheduled_only.scheduled(lowered, hlo_bytes(lowered), "sites", found.append)
    return found[0]


def sites(module: bytes, canonical: bool) -> Counter[str]:
    """The number of sites by place. With `canonical`, the pass `collective-canonicalization` runs first."""
    from dhelix.passes.communication.collective_canonicalization import CollectiveCanonicalization
    from dhelix.passes.communication.collective_matmul.collective_matmul import find_all
    from dhelix.passes.framework.manager import PassContext
    from dhelix.passes.hlo import HloModule

    view, found = HloModule.from_bytes(module), Counter[str]()
    if canonical:
        CollectiveCanonicalization().run(view, PassContext())
    for _, matches in find_all(view, Counter()):
        for match, _ in matches:
            if match.pattern.site.kind in _KINDS:
                name = match.collective.op_name
                layer = "layer" if name.count("while/body") > 1 else "head"
                found[f"{layer}, {'backward' if 'transpose(' in name else 'forward'}"] += 1
    return found


if __name__ == "__main__":
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
    main()
