"""Structure and memory of train steps, plain and as strands, compiled for H200s that this machine does not have.

    python benchmarks/programs/structure.py --list
    python benchmarks/programs/structure.py                           # all cases
    python benchmarks/programs/structure.py --cases "4 GPUs;M = 3"

Needs the extra `compile`. For each case it prints XLA's peak memory of both programs (`memory_analysis()`). The strand
loop is the outermost loop that computes for both strands. The script also prints the number of layer loops in it, and
how many of them hold both strands. Last, it prints the numbers of copies of whole stacks (residuals, weights, or
gradients of all layers) inside and outside of the layer loops.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from dhelix.models import Training
    from dhelix.passes.framework.report import StageReport
    from dhelix.passes.hlo import Computation, HloModule, Instruction

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
    """One train step; by default Llama-8B shapes with 8 layers on 4 GPUs."""

    name: str
    dp: int = 1
    tp: int = 4
    microbatches: int = 16
    preset: str = "llama-8b"
    layers: int = 8
    sharding: str = "shard_map"
    optimizer: str = "sgd"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = (
    Case("4 GPUs"),
    Case("8 GPUs, TP 4 x DP 2", dp=2),
    Case("8 GPUs, TP 8", tp=8),
    Case("64 GPUs, TP 8 x DP 8", dp=8, tp=8),
    Case("AdamW", optimizer="adamw"),
    Case("bf16 parameters", overrides={"param_dtype": "bfloat16"}),
    Case("remat full", overrides={"remat": "full"}),
    Case("unrolled layers", overrides={"scan_layers": False}),
    Case("automatic sharding", sharding="auto"),
    Case("parameters split over dp (FSDP), DP 4", dp=4, tp=1, layers=6, sharding="fsdp"),
    Case("M = 3", microbatches=3),
    Case("M = 5", microbatches=5),
    Case("Llama-25B widths, TP 8", tp=8, preset="llama-25b"),
)


@dataclasses.dataclass(frozen=True)
class Structure:
    """Layer loops and copies in the strand loop of a compiled module."""

    layer_loops: int
    merged_loops: int
    """Layer loops that compute for both strands."""
    residual_copies: tuple[str, ...]
    """Copies of a whole stack inside a layer loop."""
    other_copies: tuple[str, ...]
    """Copies of a whole stack in the strand loop, outside of layer loops."""


@dataclasses.dataclass(frozen=True)
class Measured:
    peak: int
    """Bytes, on one GPU."""
    compile_s: float
    structure: Structure | None
    """None for the plain program."""


def training_of(case: Case) -> "Training":
    """The plain train step of a case, on a mesh of GPUs that this machine does not have."""
    import optax

    from dhelix.models import make_train_step, preset
    from dhelix.runtime.compiler import deviceless

    config = preset(case.preset, layers=case.layers, **case.overrides)
    mesh = deviceless.mesh({"dp": case.dp, "tp": case.tp})
    optimizer = {"sgd": optax.sgd(0.1), "adamw": optax.adamw(1e-4)}[case.optimizer]
    return make_train_step(config, mesh, optimizer, case.microbatches, case.sharding)  # type: ignore[arg-type]


def lower(case: Case) -> "jax.stages.Lowered":
    """Lowers the plain step, with donated state and one row of tokens per micro-batch and dp shard."""
    import jax

    training = training_of(case)
    batch = training.abstract_batch(batch=case.microbatches * case.dp)
    return jax.jit(training.train_step, donate_argnums=0).lower(training.abstract_state(), batch)


def interleave(lowered: "jax.stages.Lowered") -> tuple["jax.stages.Lowered", "StageReport"]:
    """The step as two strands, and the passes' report. Raises DhelixError if a pass refuses."""
    from dhelix.passes.framework.manager import PassManager, Stage
    from dhelix.runtime.compiler import lowering
    from dhelix.runtime.step.pass_lists import strand_passes

    manager = PassManager(strand_passes(), strict=True)
    module = lowering.hlo_bytes(lowered)
    changed, report = manager.run(Stage.LOWERED, module)
    return lowering.with_hlo(lowered, changed or module), report


def measure(lowered: "jax.stages.Lowered", strands: bool) -> Measured:
    """Compiles a step. Reads its memory and, with `strands`, its structure."""
    from dhelix.passes.hlo import HloModule
    from dhelix.runtime.compiler import deviceless

    start = time.perf_counter()
    compiled = deviceless.compile(lowered)
    seconds = time.perf_counter() - start
    stats = compiled.memory_analysis()
    executable = compiled.runtime_executable()
    assert stats is not None and executable is not None
    module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    found = structure(HloModule.from_bytes(module)) if strands else None
    return Measured(stats.peak_memory_in_bytes, seconds, found)


def structure(module: "HloModule") -> Structure:
    """The structure of the strand loop: the outermost loop that computes for both strands.

    Raises:
      ValueError: the module does not have exactly one strand loop.
    """
    loops = [loop for loop in _loops(module.entry) if _strands(loop) == {"alpha", "beta"}]
    if len(loops) != 1:
        raise ValueError(f"the compiled module has {len(loops)} strand loops, not 1")
    body = loops[0].called[0]
    layers = [i for i in _loops(body) if _strands(i)]
    sizes = {size for loop in layers for size in _stack_sizes(loop)}
    inside = [copy for loop in layers for copy in _copies(loop.called[0], sizes)]
    copies = list(_copies(body, sizes))
    return Structure(
        layer_loops=len(layers),
        merged_loops=sum(_strands(loop) == {"alpha", "beta"} for loop in layers),
        residual_copies=tuple(inside),
        other_copies=tuple(copy for copy in copies if copy not in inside),
    )


def _loops(computation: "Computation") -> list["Instruction"]:
    """Loops of a computation, including those in calls and branches, but not loops inside loops."""
    found = []
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            found.append(instruction)
        elif instruction.opcode in ("call", "conditional"):
            found += [loop for called in instruction.called for loop in _loops(called)]
    return found


def _strands(loop: "Instruction") -> set[str]:
    """The strands whose matrix products run in a loop."""
    from dhelix.passes.hlo import graph

    targets = ("__cublas", "__cudnn")
    products = [i for i in graph.walk(loop.called[0]) if i.proto.custom_call_target.startswith(targets)]
    return {s for s in ("alpha", "beta") if any(f"strand_{s}/" in i.op_name for i in products)}


def _stack_sizes(loop: "Instruction") -> set[int]:
    """Sizes in bytes of the loop's arrays whose first dimension is the trip count; below 1 MiB they do not count."""
    from dhelix.passes.hlo import WhileLoop, shapes

    trips = loop.proto.backend_config.decode().partition('"known_trip_count":{"n":"')[2].partition('"')[0]
    count = int(trips) if trips else WhileLoop(loop).trip_count
    stacked = [s for s in loop.shape.tuple_shapes if len(s.dimensions) > 1 and s.dimensions[0] == count]
    return {size for size in map(shapes.byte_size, stacked) if size >= 2**20}


def _copies(computation: "Computation", sizes: set[int]) -> Iterator[str]:
    """Instructions that only move a whole array of one of `sizes`, also in called computations."""
    from dhelix.passes.hlo import shapes
    from dhelix.passes.hlo.graph import CONTROL_FLOW

    movers, free = {"copy", "copy-start", "transpose"}, {"parameter", "bitcast", "tuple"}
    for instruction in computation.instructions:
        opcodes = {instruction.opcode}
        if instruction.opcode == "fusion":
            opcodes = {i.opcode for i in instruction.called[0].instructions} - free
        elif instruction.opcode in CONTROL_FLOW:
            for called in instruction.called:
                yield from _copies(called, sizes)
        parts = instruction.shape.tuple_shapes or [instruction.shape]
        if opcodes and opcodes.issubset(movers) and sizes.intersection(map(shapes.byte_size, parts)):
            yield f"{instruction.name} {shapes.text(instruction.shape)}"


def row(case: Case) -> dict[str, Any]:
    """Compiles a case both ways and returns a row. If strands fail, the row holds the reason instead of numbers."""
    from dhelix.errors import DhelixError

    lowered = lower(case)
    plain = measure(lowered, strands=False)
    result: dict[str, Any] = {"case": case.name, "plain_peak": plain.peak, "plain_compile_s": plain.compile_s}
    try:
        start = time.perf_counter()
        changed, report = interleave(lowered)
        result["passes_s"] = time.perf_counter() - start
        result["notes"] = [f"{entry.name}: {note}" for entry in report.passes for note in entry.notes]
        strands = measure(changed, strands=True)
    except (DhelixError, ValueError) as error:
        return result | {"refused": str(error)}
    result |= {"strands_peak": strands.peak, "strands_compile_s": strands.compile_s}
    return result | dataclasses.asdict(strands.structure)  # type: ignore[call-overload]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| case | plain, GiB | strands, GiB | ratio | layer loops (merged) | copies in / beside them |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        plain = r["plain_peak"] / GIB
        if "refused" in r:
            lines.append(f"| {r['case']} | {plain:.2f} | {r['refused']} | | | |")
            continue
        strands = r["strands_peak"] / GIB
        lines.append(
            f"| {r['case']} | {plain:.2f} | {strands:.2f} | {strands / plain:.3f} | {r['layer_loops']} "
            f"({r['merged_loops']}) | {len(r['residual_copies'])} / {len(r['other_copies'])} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default="", help="names, separated by ';'; all by default")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--out", type=Path, help="file for all that was measured, as JSON")
    arguments = parser.parse_args()
    known = {case.name: case for case in CASES}
    if arguments.list:
        print("\n".join(known))
        return
    names = [name.strip() for name in arguments.cases.split(";") if name.strip()] or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no case {unknown[0]!r}; the cases are {'; '.join(known)}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    rows = []
    for name in names:
        rows.append(row(known[name]))
        print(json.dumps(rows[-1], indent=1), file=sys.stderr, flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
