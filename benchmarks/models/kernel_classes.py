"""Where the time of a plain step with experts goes, by class of kernel, beside the least time that the hardware allows.

    python benchmarks/models/kernel_classes.py --unrolled --out DIR          # needs the GPUs of --ep x --tp x --dp
    python benchmarks/models/kernel_classes.py --unrolled --on_paper         # the bounds alone

The bound of a kernel is the time of its FLOPs at the GPU's peak rate, or of its bytes at the full bandwidth of memory
or links. MFU counts only the FLOPs of the model. So the last table says which MFU the step would reach if all
communication were hidden, and if every other kernel also ran at its bound.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax

from dhelix.benchmarks.strands import run as strands
from dhelix.benchmarks.strands import worker
from dhelix.models import Training
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.analysis.execution import executions as runs_of
from dhelix.passes.analysis.execution import sequence_of
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.roofline_costs import instruction_cost
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles import hardware
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.processes.launch_settings import NO_GRAPHS
from dhelix.runtime.profiling.traces import executions
from dhelix.runtime.profiling.traces.module_executions import by_instruction

COMMUNICATION = "communication"
_STEPS = 2  # traced steps


def kernel_class(instruction: Instruction) -> str:
    """The class of a kernel, from its operator and from the place in the step that it comes from."""
    name, key = instruction.op_name, str(key_of(instruction))
    in_loop = "while/body" in name
    if find_collective(instruction) is not None:
        return COMMUNICATION
    if key.startswith("gemm"):
        sizes = key.rpartition(" ")[2].split("x")
        return "products of experts" if len(sizes) == 4 and int(sizes[3]) > 1 else "other products"
    if key.startswith("attention"):
        return "attention"
    if in_loop and name.endswith("/add") and "jvp" not in name:
        return "gradient accumulation"
    if "shard_map" not in name:
        return "optimizer and gradient norm"
    if not in_loop:
        return "casts of weights, zeros of gradients"
    return "activations, norms, dispatch, combine"


def kernels(module: HloModule) -> Iterator[tuple[Instruction, int]]:
    """Each instruction that may take time, and its number of executions in a step."""
    counts = runs_of(module)
    for computation in module.schedule:
        for instruction in sequence_of(computation):
            if instruction.opcode not in CONTROL_FLOW and counts.get(computation):
                yield instruction, counts[computation]


def bounds(module: HloModule, gpu: str) -> dict[str, float]:
    """Milliseconds that each class takes at least."""
    found: dict[str, float] = defaultdict(float)
    at = hardware.ALL[gpu]
    for instruction, count in kernels(module):
        cost, name = instruction_cost(instruction, at), kernel_class(instruction)
        moved = cost.bytes / (at.intra_bandwidth if name == COMMUNICATION else at.memory_bandwidth)
        found[name] += 1e3 * count * max(cost.flops / at.peak_flops, moved)
    return found


def measured(compiled: jax.stages.Compiled, module: HloModule, training: Training, rows: int) -> dict[str, float]:
    """Milliseconds of each class on the first GPU, from a trace. Kernels that overlap count in full."""
    state = training.init(jax.random.key(0))
    tokens = jax.numpy.ones((rows, training.config.seq + 1), "int32")
    batch = {"tokens": jax.device_put(tokens, training.batch_sharding)}
    state, _ = jax.block_until_ready(compiled(state, batch))

    def steps() -> None:
        nonlocal state
        for _ in range(_STEPS):
            state, _ = jax.block_until_ready(compiled(state, batch))

    traced = executions.record(steps, module.name)
    found: dict[str, float] = defaultdict(float)
    for instruction, times in by_instruction(module, traced[min(traced)]).items():
        if instruction.opcode not in CONTROL_FLOW:
            found[kernel_class(instruction)] += 1e3 * sum(each.seconds for each in times) / _STEPS
    return found


def main() -> None:
    made = strands.parser()
    made.set_defaults(preset="phi-moe-42b", layers=4, seq=4096, vocab=32_064, tp=1, ep=2, microbatches=4)
    options = made.parse_args()
    if options.on_paper:
        deviceless.prepare_environment()
    options.setting = options.settings
    training = worker.make_training(options)
    rows = worker.rows(options)
    example = training.abstract_state(), training.abstract_batch(rows)
    lowered = jax.jit(training.train_step, donate_argnums=0).lower(*example)
    compiled = deviceless.compile(lowered) if options.on_paper else lowered.compile(dict(NO_GRAPHS))
    module, gpu = compiled_module(compiled), worker.gpu_of(options)
    took = {} if options.on_paper else measured(compiled, module, training, rows)
    flops = rows * options.seq * training.config.flops_per_token(options.seq)
    ideal = 1e3 * flops / worker.gpus(options) / hardware.ALL[gpu].peak_flops
    report = {"on": worker.describe(options, training).on, **tables(bounds(module, gpu), took, ideal)}
    print(json.dumps(report, indent=1))
    if not options.on_paper:
        options.out.mkdir(parents=True, exist_ok=True)
        name = options.name or f"kernel_classes{'_unrolled' if options.unrolled else ''}"
        Path(options.out, f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


def tables(least: dict[str, float], took: dict[str, float], ideal: float) -> dict[str, dict[str, dict[str, float]]]:
    """The tables of the report.

    Args:
      least, took: bound and measured milliseconds of each class.
      ideal: milliseconds that the model's FLOPs take at the peak rate.
    """
    columns = {"measured, ms": took, "bound, ms": least} if took else {"bound, ms": least}
    rows = {
        name: {head: times.get(name, 0.0) for head, times in columns.items()}
        for name in sorted(least, key=lambda name: -least[name])
    }
    compute = {
        head: sum(time for name, time in times.items() if name != COMMUNICATION) for head, times in columns.items()
    }
    mfu = {head.partition(",")[0]: {"compute, ms": ms, "MFU, %": 100 * ideal / ms} for head, ms in compute.items()}
    return {"kernels of a step": rows, "if all communication were hidden": mfu}


if __name__ == "__main__":
    main()
