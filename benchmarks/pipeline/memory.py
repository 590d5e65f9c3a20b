"""Memory of pipelined steps: W and interleaved SI beside 1F1B and the bidirectional pipeline. No GPU is needed.

    python benchmarks/pipeline/memory.py steps      # 64 H200s, Llama-66B: peak and compile time
    python benchmarks/pipeline/memory.py largest    # 2 and 4 H200s: the largest model of Llama-8B's layers
    python benchmarks/pipeline/memory.py paper      # section 6.5 of DHelix (arXiv 2411.15871): 64 GPUs of 48 GB
    python benchmarks/pipeline/memory.py            # prints tables of all results so far

Needs the extra `compile`. A step's need is the compiler's count (`memory_analysis()`): arguments, temporaries, and
results that do not reuse an argument's memory. Its parts:

    state        float32 parameters and optimizer moments: the arguments
    gradients    float32 sums, as large as the parameters
    weights      bfloat16 stacks of the layers' weights, in the state of the compiled loops over ticks
    residuals    the ring of residuals, in the same state
    rest         a tick's working memory, buffers for messages, gaps

The bidirectional pipeline is not compiled. Its need is computed from W: a second copy of the layers adds their state,
gradients and weights once more.

The largest model is searched in steps of 2P layers on P stages, for all schedules alike. A straight line through the
memory of two compiled sizes predicts the largest size, which is then compiled. The tables also give a fractional number
of layers: the point where the line through the two sizes nearest to the limit reaches the limit. This number shows
differences that are smaller than a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dhelix.benchmarks.pipeline.variants import VARIANTS
from dhelix.errors import DhelixError

if TYPE_CHECKING:
    from dhelix.passes.hlo import HloModule
    from dhelix.passes.pipeline_fold import Schedule

GIB = 2**30
RESULTS = Path(__file__).parents[1] / "results"
W, ONE, OWN_ENDS, SI = "W, xla", "1F1B, shared ends", "1F1B", "SI, xla"
BIDIRECTIONAL = "bidirectional"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Attributes:
      vocab, seq: replace those of the preset; None keeps them.
      limit: bytes that a step may need on each GPU.
    """

    name: str
    preset: str
    layers: int
    stages: int
    tp: int
    dp: int = 1
    microbatches: int = 16
    vocab: int | None = None
    seq: int | None = None
    limit: int = 0

    @property
    def gpus(self) -> int:
        return self.stages * self.tp * self.dp

    def config(self, layers: int) -> Any:
        from dhelix.models import preset

        others = {"vocab": self.vocab, "seq": self.seq}
        return preset(self.preset, layers, **{name: value for name, value in others.items() if value})


H200 = int(0.9 * 140.4 * GIB)
"""Bytes that XLA uses of a GPU's 140.4 GiB with XLA_PYTHON_CLIENT_MEM_FRACTION=0.9, as in `run.py` for one setting."""
STEPS = Case("64 H200s, PP 8 x TP 8", "llama-66b", 76, 8, 8, microbatches=32)
LARGEST = (
    Case("4 H200s, PP 4", "llama-8b", 16, 4, 1, vocab=32_000, limit=H200),
    Case("4 H200s, PP 2 x TP 2", "llama-8b", 16, 2, 2, vocab=32_000, limit=H200),
    Case("2 H200s, PP 2", "llama-8b", 16, 2, 1, vocab=32_000, limit=H200),
)
PAPER = Case("64 GPUs of 48 GB, DP 4, TP 8, PP 2", "llama-25b", 28, 2, 8, 4, limit=int(48e9))


@dataclasses.dataclass(frozen=True)
class Need:
    """The memory that one step needs on each GPU, in bytes. `state` to `rest` add up to `peak`.

    Attributes:
      billions: parameters of the model, in billions.
      layer_parameters: bytes of the layers' float32 parameters on one GPU, padding included.
    """

    case: str
    variant: str
    layers: int
    billions: float
    peak: int
    state: int
    gradients: int
    weights: int
    residuals: int
    rest: int
    layer_parameters: int
    lower_s: float = 0.0
    compile_s: float = 0.0


def measure(case: Case, name: str, layers: int) -> Need:
    """Compiles one step of the variant `name` and reads its memory."""
    import jax

    from dhelix import strand_interleave
    from dhelix.benchmarks.pipeline.variants import training_of
    from dhelix.launch.train.meshes.pipelined import PipelinedTraining
    from dhelix.runtime.compiler import deviceless
    from dhelix.runtime.compiler.lowering import compiled_module

    start = time.perf_counter()
    hosts = max(case.gpus // 8, 1)
    devices = deviceless.topology("h200", f"1x{hosts}x{case.gpus // hosts}").devices
    config = case.config(layers)
    training = training_of(VARIANTS[name], config, case.stages, case.tp, case.microbatches, devices, case.dp)
    batch = training.abstract_batch(case.microbatches * case.dp)
    step: Any = jax.jit(training.train_step, donate_argnums=0)
    if isinstance(training, PipelinedTraining):
        pipeline = {"pipeline": training.fold, "microbatches": case.microbatches}
        step = strand_interleave(training.train_step, donate_argnums=0, passes=(), **pipeline)
    lowered = step.lower(training.abstract_state(), batch)
    lowered_at = time.perf_counter()
    compiled = deviceless.compile(lowered)
    end = time.perf_counter()
    found = compiled.memory_analysis()
    assert found is not None
    peak = (
        found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    )
    state = training.abstract_state()
    gradients = sum(map(_bytes_on_gpu, jax.tree.leaves(state.params)))
    weights = residuals = 0
    if isinstance(training, PipelinedTraining):
        schedule = training.fold.make_schedule(layers, case.microbatches)
        weights, residuals = in_loops(compiled_module(compiled), schedule)
    rest = peak - found.argument_size_in_bytes - gradients - weights - residuals
    return Need(
        case.name, name, layers, config.parameter_count / 1e9, peak, found.argument_size_in_bytes, gradients, weights,
        residuals, rest, sum(map(_bytes_on_gpu, jax.tree.leaves(state.params["layers"]))),
        lower_s=lowered_at - start, compile_s=end - lowered_at,
    )  # fmt: skip


def _bytes_on_gpu(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def in_loops(module: HloModule, schedule: Schedule) -> tuple[int, int]:
    """Bytes of bfloat16 weights and of residuals in the state of a loop over ticks; the largest loop counts."""
    from dhelix.passes.hlo import shapes

    stack = [schedule.layout.chunks // schedule.layout.stages, schedule.layout.padded]
    found = [(0, 0)]
    for loop in (i for i in module.entry.instructions if i.opcode == "while"):
        weights = residuals = 0
        for shape in filter(shapes.is_floating, loop.shape.tuple_shapes):
            dimensions = list(shape.dimensions)
            if dimensions[:2] == stack:
                weights += shapes.byte_size(shape) if shapes.type_name(shape) == "bf16" else 0
            elif len(dimensions) > 2 and dimensions[0] >= schedule.slots:
                residuals += shapes.byte_size(shape)
        found.append((weights, residuals))
    return max(found, key=sum)


def both_ways(need: Need) -> Need:
    """The bidirectional pipeline's need, from W's: adds a second copy of the layers, with its moments and gradients."""
    state, gradients, weights = 3 * need.layer_parameters, need.layer_parameters, need.weights
    return dataclasses.replace(
        need, peak=need.peak + state + gradients + weights, state=need.state + state,
        gradients=need.gradients + gradients, weights=need.weights + weights,
    )  # fmt: skip


def sharded(need: Need, dp: int) -> Need:
    """The need with float32 parameters and moments split over data parallelism (ZeRO-1). Computed, not compiled."""
    saved = need.state - need.state // dp
    return dataclasses.replace(need, peak=need.peak - saved, state=need.state - saved)


# The compared pipelines: name, compiled variant, and a function from the variant's memory to the pipeline's.
COMPARED: tuple[tuple[str, str, Callable[[Need], Need]], ...] = (
    ("1F1B", ONE, lambda need: need),
    ("W", W, lambda need: need),
    (BIDIRECTIONAL, W, both_ways),
)


class Largest:
    """Searches the largest models of a case. `needs` holds all steps compiled so far."""

    def __init__(self, case: Case, needs: Sequence[Need] = ()) -> None:
        self.case, self.step = case, 2 * case.stages
        self.needs = [need for need in needs if need.case == case.name]

    def search(self, variant: str, change: Callable[[Need], Need]) -> None:
        """Compiles sizes until the line through them predicts a size that is already compiled."""
        for layers in (self.step * 2, self.step * 4):
            self._need(variant, layers)
        known = 0
        while known != len(self.needs):
            known = len(self.needs)
            self._need(variant, int(self.on_line(variant, change)) // self.step * self.step)

    def in_steps(self, variant: str, change: Callable[[Need], Need]) -> Need:
        """The largest compiled model that fits."""
        fit = [n for n in map(change, self._of(variant)) if n.peak <= self.case.limit]
        return max(fit, key=lambda need: need.layers)

    def on_line(self, variant: str, change: Callable[[Need], Need]) -> float:
        """The fractional number of layers at which the line of the two sizes nearest to the limit reaches it."""
        needs = sorted(map(change, self._of(variant)), key=lambda need: abs(need.peak - self.case.limit))
        a, b = sorted(needs[:2], key=lambda need: need.layers)
        return a.layers + (self.case.limit - a.peak) / (b.peak - a.peak) * (b.layers - a.layers)

    def billions(self, layers: float) -> float:
        """Billions of parameters of a model with `layers` layers."""
        one, two = (self.case.config(count).parameter_count for count in (1, 2))
        return (one + (layers - 1) * (two - one)) / 1e9

    def _of(self, variant: str) -> list[Need]:
        return [need for need in self.needs if need.variant == variant]

    def _need(self, variant: str, layers: int) -> None:
        if layers not in [need.layers for need in self._of(variant)]:
            self.needs.append(say(measure(self.case, variant, layers)))


def say(need: Need) -> Need:
    print(
        f"{need.case}, {need.variant}, {need.layers} layers: {need.peak / GIB:.2f} GiB, {need.compile_s:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return need


def changes_of(case: Case) -> dict[str, Callable[[Need], Need]]:
    """Ways to store parameters and moments, by note: as compiled and, with data parallelism, also split over DP."""
    found: dict[str, Callable[[Need], Need]] = {"": lambda need: need}
    if case.dp > 1:
        found[f"state split over DP {case.dp}"] = lambda need: sharded(need, case.dp)
    return found


def study(name: str, path: Path) -> list[Need]:
    """Runs one study. Writes the file after every search, and does not compile again what the file holds."""
    needs = load(path) if path.is_file() else []
    if name == "steps":
        for variant in (W, SI, ONE, OWN_ENDS):
            if variant not in [need.variant for need in needs]:
                needs.append(say(measure(STEPS, variant, STEPS.layers)))
                save(path, needs)
        return needs
    for case in LARGEST if name == "largest" else (PAPER,):
        largest = Largest(case, needs)
        others = [need for need in needs if need.case != case.name]
        for outer in changes_of(case).values():
            for _, variant, inner in COMPARED:
                largest.search(variant, lambda need, inner=inner, outer=outer: outer(inner(need)))
                save(path, [*others, *largest.needs])
        needs = [*others, *largest.needs]
    return needs


def save(path: Path, needs: Sequence[Need]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(need) for need in needs], indent=1) + "\n")


def load(path: Path) -> list[Need]:
    return [Need(**record) for record in json.loads(path.read_text())]


def steps_table(needs: Sequence[Need]) -> str:
    one = next(need for need in needs if need.variant == ONE)
    parts = ("state", "gradients", "weights", "residuals", "rest")
    lines = [
        f"| {needs[0].case} | peak, GiB | over 1F1B | {' | '.join(parts)} | lowering, s | compile, s |",
        "|" + "---|" * (len(parts) + 5),
    ]
    for need in needs:
        sizes = " | ".join(f"{getattr(need, part) / GIB:.2f}" for part in parts)
        over = f"{need.peak / one.peak - 1:+.1%}"
        times = f"{need.lower_s:.0f} | {need.compile_s:.0f}"
        lines.append(f"| {need.variant} | {need.peak / GIB:.2f} | {over} | {sizes} | {times} |")
    return "\n".join(lines)


def largest_table(cases: Sequence[Case], needs: Sequence[Need]) -> str:
    lines = [
        "| GPUs | pipeline | largest in steps of 2P: layers, parameters, GiB | by the line: layers, parameters "
        "| of 1F1B's |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        largest = Largest(case, needs)
        for note, outer in changes_of(case).items():
            one = 0.0
            for name, variant, inner in COMPARED:
                change: Callable[[Need], Need] = lambda need, inner=inner, outer=outer: outer(inner(need))  # noqa: E731
                found, layers = largest.in_steps(variant, change), largest.on_line(variant, change)
                size = largest.billions(layers)
                one = one or size
                whole = f"{found.layers}, {found.billions:.2f} B, {found.peak / GIB:.1f}"
                gpus = ", ".join(filter(None, (case.name, note)))
                lines.append(f"| {gpus} | {name} | {whole} | {layers:.1f}, {size:.2f} B | {size / one:.1%} |")
    return "\n".join(lines)


def tables() -> str:
    """Markdown tables of all studies that have results."""
    parts = []
    for name in STUDIES:
        if (path := file_of(name)).is_file():
            needs = load(path)
            cases = LARGEST if name == "largest" else (PAPER,)
            parts.append(steps_table(needs) if name == "steps" else largest_table(cases, needs))
    return "\n\n".join(parts)


STUDIES = ("steps", "largest", "paper")


def file_of(name: str) -> Path:
    return RESULTS / f"pipeline_memory_{name}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], help="to run; none: tables alone")
    arguments = parser.parse_args()
    from dhelix.runtime.compiler import deviceless

    deviceless.prepare_environment()
    try:
        for name in arguments.studies:
            study(name, file_of(name))
        print(tables())
    except (DhelixError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
