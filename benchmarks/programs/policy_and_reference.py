"""Predicts without a GPU how much exposed communication a frozen reference model adds to a GRPO step.

    python benchmarks/programs/policy_and_reference.py --tp 2,4 --out DIR
    python benchmarks/programs/policy_and_reference.py --tables DIR/policy_and_reference.json

Needs the extra `compile`. Policy and reference are Llama-8B with fewer layers, tensor and sequence parallel. The policy
recomputes each layer in the backward pass. The steps with and without reference are compiled for a GPU with a shipped
profile, plain and with two strands, and the evaluator simulates them. Strands are ordered as by `schedule="dp"`, within
the plain step's memory plus 3 %. Plain steps keep XLA's order. `python -m dhelix.benchmarks.pages.write` puts the
tables into docs/results/.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_NAME = "jit_step"
GOAL = 1.2
"""Goal: exposed communication with the reference over exposed communication without it."""


@dataclass(frozen=True)
class Row:
    """One step. Times in milliseconds, memory in GiB on one GPU.

    Attributes:
      exposed: time in which communication runs and compute waits.
      memory: temporaries by the compiler's count; with strands, before they are ordered.
      merged: names of the loops in which layers of both strands run together.
    """

    gpu: str
    link: str
    setting: str
    tp: int
    layers: int
    microbatches: int
    reference: bool
    strands: bool
    step: float
    communication: float
    exposed: float
    memory: float
    merged: tuple[str, ...] = ()


def make_step(config: Any, mesh: Any, microbatches: int, with_reference: bool) -> tuple[Any, tuple[Any, ...]]:
    """A GRPO step with one update, and its abstract arguments: policy, reference, rows of tokens, advantages."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from dhelix.models.common.cross_entropy import cross_entropy
    from dhelix.models.common.parallel import ManualParallel
    from dhelix.models.llama import model as llama

    parallel, specs = ManualParallel(), llama.param_specs(config)

    def log_probability(params: Any, rows: Any) -> Any:
        inputs, targets = rows[:, :-1], rows[:, 1:]
        entropy: Any = cross_entropy(llama.logits(config, params, inputs, parallel), targets, parallel.ends)
        return -entropy

    def loss(policy: Any, reference: Any, rows: Any, advantage: Any) -> Any:
        ours = log_probability(policy, rows)
        value = -jnp.exp(ours - jax.lax.stop_gradient(ours)) * advantage[:, None]
        if with_reference:
            distance = jax.lax.stop_gradient(log_probability(reference, rows)) - ours
            value += 0.04 * (jnp.exp(distance) - distance - 1)
        return jnp.mean(value)

    def local(policy: Any, reference: Any, rows: Any, advantages: Any) -> Any:
        def micro_batch(sums: Any, one: Any) -> tuple[Any, None]:
            new = jax.value_and_grad(loss)(policy, reference, *one)
            return jax.tree.map(lambda total, value: total + value.astype(jnp.float32), sums, new), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), policy)
        batch = rows.reshape(microbatches, -1, rows.shape[-1]), advantages.reshape(microbatches, -1)
        return jax.lax.scan(micro_batch, (jnp.float32(0), zeros), batch)[0]

    replicated = PartitionSpec()
    gradients = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, specs if with_reference else replicated, replicated, replicated),
        out_specs=(replicated, specs),
        check_vma=False,
    )

    def step(policy: Any, reference: Any, rows: Any, advantages: Any) -> Any:
        value, grads = gradients(policy, reference, rows, advantages)
        return jax.tree.map(lambda p, g: p - (1e-6 * g).astype(p.dtype), policy, grads), value

    def shaped(leaf: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    shapes = jax.eval_shape(functools.partial(llama.init_params, config), jax.random.key(0))
    params = jax.tree.map(shaped, shapes, specs)
    here = NamedSharding(mesh, replicated)
    rows = jax.ShapeDtypeStruct((microbatches, config.seq + 1), jnp.int32, sharding=here)
    advantages = jax.ShapeDtypeStruct((microbatches,), jnp.float32, sharding=here)
    return step, (params, params if with_reference else jnp.float32(0), rows, advantages)


def compiled(step: Any, arguments: tuple[Any, ...], gpu: str, mesh: Any, strands: bool) -> tuple[Any, tuple[str, ...]]:
    """The program before the passes that order it, and the names of the loops with layers of both strands."""
    import jax

    from dhelix import strand_interleave
    from dhelix.launch.inspect.reading import dumps
    from dhelix.launch.plan.program import Program
    from dhelix.passes.framework.manager import Stage
    from dhelix.runtime.compiler import registration, tuned
    from dhelix.runtime.processes.launch_settings import NO_GRAPHS
    from dhelix.runtime.step.pass_lists import strand_passes

    options: dict[str, Any] = {"donate_argnums": 0, "compiler_options": dict(NO_GRAPHS)}
    run: Any = jax.jit(step, **options)
    if strands:
        run = strand_interleave(step, passes=strand_passes(), strict=True, **options)
    modules: dict[Stage, bytes] = {}
    with registration.temporary_hook(modules.__setitem__, _NAME):
        memory = dumps.memory_of(tuned.compile(run.lower(*arguments)))
    merged: tuple[str, ...] = ()
    if strands:
        notes = run.report(*arguments)["strand-duplication"].notes
        merged = next(tuple(note.facts["merged_loops"]) for note in notes if note.message == "two strands")
    return Program("GRPO", modules[Stage.POST_SCHEDULER], mesh.size, gpu, memory), merged


def rows_of(options: argparse.Namespace, tp: int, link: str, setting: str) -> list[Row]:
    from dhelix.launch.plan import search as plan_search
    from dhelix.models import preset
    from dhelix.passes.evaluation.costs import CostModel
    from dhelix.passes.evaluation.timeline import simulate_module
    from dhelix.passes.hlo import HloModule
    from dhelix.profiles.files import storage
    from dhelix.runtime.compiler import deviceless
    from dhelix.runtime.step.options import StepOptions

    profile = storage.find(options.gpu, link)
    if profile is None or setting not in profile.sections:
        sys.exit(f"no profile of {options.gpu}, {link}, {setting} is shipped: give others")
    model = CostModel(profile, setting)
    config = preset("llama-8b", options.layers, remat="full", attention="cudnn", seq=options.seq)
    mesh = deviceless.mesh({"dp": 1, "tp": tp}, options.gpu.lower())
    found: list[Row] = []
    for reference in (False, True):
        step, arguments = make_step(config, mesh, options.microbatches, reference)
        plain, _ = compiled(step, arguments, options.gpu, mesh, strands=False)
        both, merged = compiled(step, arguments, options.gpu, mesh, strands=True)
        module, costs = HloModule.from_bytes(plain.module), model.costs()
        alone = simulate_module(module, costs.hardware, costs)
        ordered = plan_search.search(both, model, StepOptions(), plan_search.MemoryLimit.of(None, plain))
        for strands, program, timeline in ((False, plain, alone), (True, both, ordered.timeline)):
            step_ms, sent, exposed = (
                round(1e3 * s, 2) for s in (timeline.seconds, timeline.communication, timeline.exposed)
            )
            gib = round(program.memory.temporaries / 2**30, 3)
            made = merged if strands else ()
            size = tp, options.layers, options.microbatches
            found.append(Row(options.gpu, link, setting, *size, reference, strands, step_ms, sent, exposed, gib, made))
            print(found[-1], flush=True)
    return found


def table(rows: Sequence[Row]) -> str:
    """A Markdown table that compares each step with reference with the step without."""
    lines = [
        "| GPUs, link, setting | | without: step, exposed | with: step, exposed | exposed, with / without |",
        "|---|---|---|---|---|",
    ]
    alone = {(r.gpu, r.link, r.setting, r.tp, r.layers, r.microbatches, r.strands): r for r in rows if not r.reference}
    for row in (row for row in rows if row.reference):
        other = alone[row.gpu, row.link, row.setting, row.tp, row.layers, row.microbatches, row.strands]
        where = f"{row.tp} {row.gpu}, {row.link}, `{row.setting}`"
        cells = [f"{r.step:.1f}, {r.exposed:.1f} ms" for r in (other, row)]
        how = "strands" if row.strands else "plain"
        lines.append(f"| {where} | {how} | {' | '.join(cells)} | {row.exposed / other.exposed:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--tp", default="2,4", help="how many GPUs, separated by commas")
    parser.add_argument("--settings", default="nvlink/connections1,no-p2p/small-buffers", help="LINK/SETTING, ...")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--tables", type=Path, nargs="+", help="files of earlier calls; nothing is compiled")
    options = parser.parse_args()
    if options.tables:
        rows = [Row(**row) for path in options.tables for row in json.loads(path.read_text())]
    else:
        settings = [which.split("/") for which in options.settings.split(",")]
        sizes = [int(tp) for tp in options.tp.split(",")]
        rows = [row for tp in sizes for link, setting in settings for row in rows_of(options, tp, link, setting)]
        options.out.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
        Path(options.out, "policy_and_reference.json").write_text(f"[\n{lines}\n]\n")
    print(table(rows))


if __name__ == "__main__":
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
    main()
