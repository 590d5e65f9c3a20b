"""A process of `strands/run.py`: compiles the variants of one setting, and runs them in turns.

The process reads its options from one JSON argument, and writes results to a file as they come. In order:

1. It compiles the first variant, which autotunes new products. Then it compiles the others, several at a time.
2. Each variant runs its first steps from the same state, so losses can be compared.
3. It runs rounds of timed steps. The variants pass one state on to each other.
4. It traces one step of each variant.

Between the parts, the processes of other settings have their turns (`processes.py`).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from dhelix import strand_interleave
from dhelix.benchmarks.collectives.gpu_clocks import Clocks, joules
from dhelix.benchmarks.prediction.unseen import capped_bandwidth, unseen
from dhelix.benchmarks.strands.processes import end_part
from dhelix.benchmarks.strands.results import Result, Run
from dhelix.benchmarks.strands.variants import SETTINGS, VARIANTS, XLA, Setting, Variant, passes_of
from dhelix.errors import DhelixError
from dhelix.launch.train.meshes.sharded import with_states
from dhelix.models import MoeConfig, Training, preset
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.mesh import make_mesh
from dhelix.models.train_step import make_train_step
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles import hardware
from dhelix.profiles.files import xla_tables
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.profiling.provenance import provenance
from dhelix.runtime.profiling.traces import trace
from dhelix.runtime.sharding.sharded_program import sharded_program


@dataclass
class Program:
    """A compiled variant and its result so far."""

    variant: Any
    compiled: Any
    result: Result


class Worker:
    """The variants of one setting. Subclasses have other variants, each perhaps with its own train step."""

    variants: Mapping[str, Any] = VARIANTS

    def __init__(self, options: Namespace) -> None:
        self.options = options
        setting: Setting = SETTINGS[options.setting]
        per_node = gpus(options) // setting.nodes if setting.nodes > 1 else 0
        self.setting = replace(setting, gpu=gpu_of(options), gpus_per_node=per_node)
        self.began = time.monotonic()
        self.training = self.make_training()
        self.run = self.describe()
        self.programs: list[Program] = []
        self.steps: dict[str, Any] = {}

    def make_training(self) -> Training:
        return make_training(self.options)

    def describe(self) -> Run:
        return describe(self.options, self.training)

    def training_of(self, variant: Any) -> Training:
        """The train step of a variant."""
        return self.training

    def parts(self) -> Iterator[None]:
        """Does the work. Yields between parts, so the processes of other settings can have their turns."""
        # 1. Compilation
        self.compile_all()
        if self.options.on_paper:
            return self.predict_all()
        # 2. First steps
        if self.programs:
            self.check()
        # 3. Timed steps
        if self.programs and self.options.rounds:
            for _ in self.turns():
                yield
        # 4. Traces
        if self.programs and not self.options.no_traces and jax.default_backend() == "gpu":
            yield
            self.trace_all()

    # --- Compiling.

    def compile_all(self) -> None:
        names = [name for name in self.options.variants]
        threads = 1 if jax.process_count() > 1 else self.options.threads  # all processes must compile in the same order
        first, others = names[:1], names[1:]
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            made = [self.compile(name) for name in first] + list(pool.map(self.compile, others))
        self.programs = [program for program in made if program is not None]
        self.say(f"{len(self.programs)} of {len(names)} programs compiled")
        self.save()

    def compile(self, name: str) -> Program | None:
        """The compiled variant; None if that fails, so that one variant does not stop the others."""
        variant, result = self.variants[name], Result(self.setting.name, name)
        self.run.results.append(result)
        start = time.monotonic()
        try:
            compiled, result.passes, result.passes_s = self.build(variant)
            result.compile_s = time.monotonic() - start
            memory = compiled.memory_analysis()
            if memory is not None:
                result.peak_gib, result.temp_gib = (
                    memory.peak_memory_in_bytes / 2**30,
                    memory.temp_size_in_bytes / 2**30,
                )
            if self.options.dump_hlo:
                file = f"{self.setting.name}_{name}.txt".replace(" ", "_").replace(",", "")
                Path(self.options.out, file).write_text(compiled.as_text())
        except Exception as error:
            self.fail(result, "did not compile", error)
            return None
        self.say(f"{name}: compiled in {result.compile_s:.0f} s")
        return Program(variant, compiled, result)

    def build(self, variant: Variant) -> tuple[Any, dict[str, str], float]:
        """Compiles with `jax.jit` or the decorator. Returns the program, outcomes by pass, and the passes' seconds."""
        options = dict(variant.options)
        if self.options.channels:
            options["xla_gpu_nccl_collective_max_nchannels"] = self.options.channels
        example = self.training.abstract_state(), self.training.abstract_batch(rows(self.options))
        if variant.as_used:
            return self.build_by_decorator(variant, options, example)
        passes = passes_of(variant, self.setting, list(self.training.mesh.devices.flat))
        if not passes:
            lowered = jax.jit(self.training.train_step, donate_argnums=0).lower(*example)
            if self.options.states:
                lowered, _ = sharded_program(lowered, self.options.states)
            if variant.guided:
                options["xla_gpu_pgle_profile_file_or_directory_path"] = self.guide(self.xla(lowered, {}))
            return self.xla(lowered, options), {}, 0.0
        key = repr(replace(variant, name="", options={}))
        new = strand_interleave(self.training.train_step, passes=passes, strict=True, donate_argnums=0, **self.states)
        step = self.steps.setdefault(key, new)  # variants with the same passes share a step and its report
        return self.compile_step(step, options, example)

    def build_by_decorator(
        self, variant: Variant, options: dict[str, Any], example: Any
    ) -> tuple[Any, dict[str, str], float]:
        """Compiles with the decorator's own choices, as for its users. Returns the same as `build`."""
        order: Any = variant.order
        step = strand_interleave(
            self.training.train_step, schedule=order, profile=self.setting.costs().profile,
            collective_matmul=variant.collective_matmul, strict=True, donate_argnums=0, compiler_options=options,
            **self.states,
        )  # fmt: skip
        return self.compile_step(step, options, example)

    @property
    def states(self) -> dict[str, Any]:
        """The decorator's option for sharded states, if they are."""
        return {"sharding": self.options.states} if self.options.states else {}

    def compile_step(self, step: Any, options: dict[str, Any], example: Any) -> tuple[Any, dict[str, str], float]:
        compiled = self.xla(step.lower(*example), options)
        on_gpus = self.training.mesh.devices.flat[0].platform == "gpu"
        report = step.report(*example) if on_gpus else step.preview(*example)
        outcomes = {entry.name: entry.outcome for entry in report}
        return compiled, outcomes, sum(stage.seconds for stage in report.stages)

    def xla(self, lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
        return deviceless.compile(lowered, **options) if self.options.on_paper else lowered.compile(options)

    def guide(self, compiled: Any, name: str = "") -> str:
        """Writes the instructions' times from the shipped profile for XLA's scheduler (PGLE). Returns the path.

        Args:
          name: of the program, if a setting has several guided ones.
        """
        costs = self.setting.costs().costs()
        instructions = (i for c in compiled_module(compiled).schedule for i in c.instructions)
        timed = (i for i in instructions if i.opcode not in CONTROL_FLOW and costs.operator_keys[i] is not None)
        path = Path(self.options.out, f"{self.setting.name}{name}.pgle.pbtxt")
        path.write_text(xla_tables.cost_text({i.name: costs[i].seconds for i in timed}))
        return str(path)

    # --- Running.

    def check(self) -> None:
        """Runs the first steps of every variant from the same state. They also warm the variant up."""
        for program in list(self.programs):
            if self.late(0.9):
                self.fail(program.result, "did not run", TimeoutError("out of time"))
                self.programs.remove(program)
                continue
            try:
                training = self.training_of(program.variant)
                state = training.init(jax.random.key(0))
                for batch in self.batches(training, max(self.options.check_steps, 1)):
                    state, metrics = program.compiled(state, batch)
                    program.result.losses.append(float(metrics["loss"]))
                    program.result.grad_norms.append(float(metrics["grad_norm"]))
                    if "dropped" in metrics:
                        program.result.dropped.append(float(metrics["dropped"]))
            except Exception as error:
                self.fail(program.result, "did not run", error)
                self.programs.remove(program)
            state = None  # frees it, so that two states never live at once
        self.save()

    def turns(self) -> Iterator[None]:
        """Rounds of timed steps; yields before each."""
        training, state, batches = None, None, []
        with Clocks() as clocks:
            for turn in range(self.options.rounds):
                yield
                for program in self.programs:
                    if self.training_of(program.variant) is not training:
                        training, state = self.training_of(program.variant), None  # frees the old state first
                        state, batches = training.init(jax.random.key(0)), self.batches(training, self.options.steps)
                        jax.block_until_ready((state, batches))  # keeps their time out of the first step
                    before = joules()
                    for batch in batches:
                        state = timed(program, clocks, state, batch)
                    after = joules()
                    if before is not None and after is not None and batches:
                        program.result.joules.append((after - before) / len(batches))
                self.save()
                if self.late(0.6):
                    self.run.dropped.append(f"setting {self.setting.name}: {turn + 1} of {self.options.rounds} rounds")
                    break

    def trace_all(self) -> None:
        """Traces one step of each variant, and predicts its time. Other variants of XLA than "plain" come last."""
        order = sorted(
            self.programs, key=lambda p: (p.variant.kind == XLA and p.variant.name != "plain", p.variant.kind)
        )
        for program in order:
            if self.late(0.9):
                self.run.dropped.append(f"setting {self.setting.name}: the trace of {program.variant.name}")
                continue
            try:
                module, training = compiled_module(program.compiled), self.training_of(program.variant)
                state = jax.block_until_ready(training.init(jax.random.key(0)))
                add_trace(program.result, traced(program.compiled, state, self.batches(training, 1)[0], module))
                program.result.predicted_ms = self.predict(module)
            except Exception as error:
                self.say(f"{program.variant.name}: no trace: {first_line(error)}")
            self.save()

    def predict_all(self) -> None:
        for program in self.programs:
            program.result.predicted_ms = self.predict(compiled_module(program.compiled))
            self.say(f"{program.variant.name}: {program.result.predicted_ms:.1f} ms by the evaluator")

    def predict(self, module: Any) -> float:
        model = self.setting.costs()
        if self.options.unseen:
            limit = self.options.channels
            model = unseen(model, module, capped_bandwidth(limit) if limit else 0.0)
        costs: Costs = model.costs()
        return 1e3 * simulate_module(module, model.hardware, costs).seconds

    def batches(self, training: Training, count: int) -> list[dict[str, jax.Array]]:
        random = np.random.default_rng(0)
        shape = (rows(self.options), self.options.seq + 1)
        tokens = (random.integers(0, training.config.vocab, shape, "int32") for _ in range(count))
        return [{"tokens": jax.device_put(t, training.batch_sharding)} for t in tokens]

    # --- Book-keeping.

    def late(self, share: float) -> bool:
        """Whether this fraction of the time is spent. False in distributed runs, where all processes must agree."""
        return jax.process_count() == 1 and time.monotonic() - self.began > share * self.options.seconds

    def fail(self, result: Result, what: str, error: Exception) -> None:
        result.failed = f"{what}: {first_line(error)}"
        self.say(f"{result.variant} {result.failed}")

    def save(self) -> None:
        if jax.process_index() == 0:
            self.run.write(Path(self.options.file))

    def say(self, text: str) -> None:
        if jax.process_index() == 0:
            print(f"[{time.monotonic() - self.began:4.0f} s] {self.setting.name}: {text}", file=sys.stderr, flush=True)


def gpu_of(options: Namespace) -> str:
    """The GPU whose costs are used: the one here, or `--hardware` without a GPU."""
    here = not options.on_paper and jax.default_backend() == "gpu"
    return hardware.gpu_name(jax.devices()[0].device_kind) if here else options.hardware


def make_training(options: Namespace) -> Training:
    given = {"capacity_factor": options.capacity} if options.capacity else {}
    config: Any = preset(
        options.preset, options.layers, seq=options.seq, vocab=options.vocab, scan_layers=not options.unrolled, **given
    )
    if options.shards:
        config = narrowed(config, options.tp, options.shards)
    nodes = SETTINGS[options.setting].nodes
    shape = f"1x{nodes}x{gpus(options) // nodes}"
    if options.on_paper:
        asked = {"dp": options.dp, "ep": options.ep, "cp": options.cp if options.cp > 1 else 0, "tp": options.tp}
        axes = {name: size for name, size in asked.items() if size}
        mesh = deviceless.mesh(axes, options.hardware.lower(), shape)
    else:
        mesh = make_mesh(options.dp, options.tp, ep=options.ep or None, cp=options.cp)
    made = make_train_step(config, mesh, optax.adamw(1e-4), options.microbatches, options.sharding, options.context)
    return with_states(made, options.states) if options.states else made


def gpus(options: Namespace) -> int:
    return options.dp * max(options.ep, 1) * options.cp * options.tp


def rows(options: Namespace) -> int:
    """Number of sequences in a step."""
    return options.dp * max(options.ep, 1) * options.microbatches


def narrowed[Config: DecoderConfig](config: Config, tp: int, shards: int) -> Config:
    """Narrows `config` so that each of `tp` GPUs has the heads, FFN and vocabulary of one of `shards` GPUs.

    Raises:
      DhelixError: a size is not divisible.
    """
    sizes = {name: getattr(config, name) for name in ("heads", "kv_heads", "ffn", "vocab")}
    if odd := [f"{name} {size}" for name, size in sizes.items() if size * tp % shards or size % shards]:
        raise DhelixError(f"{', '.join(odd)}: no multiple of {shards} shards; give --shards that divides them")
    return replace(config, **{name: size * tp // shards for name, size in sizes.items()})


def describe(options: Namespace, training: Training) -> Run:
    """A run that has no results yet."""
    on = provenance()
    tokens = rows(options) * options.seq
    known = hardware.ALL.get(hardware.gpu_name(on.gpu)) if jax.default_backend() == "gpu" else None
    names = ("preset", "layers", "seq", "vocab", "tp", "microbatches", "unrolled", "channels", "shards")
    names += ("dp", "sharding") if options.dp > 1 or options.sharding != "shard_map" else ()
    names += ("states",) if options.states else ()
    names += ("ep",) if options.ep else ()
    names += ("cp", "context") if options.cp > 1 else ()
    capacity = {"capacity": training.config.capacity_factor} if isinstance(training.config, MoeConfig) else {}
    which = f"{on.gpus} x {on.gpu}, driver {on.driver}"
    if options.on_paper:
        which = f"{gpus(options)} x {options.hardware}, on paper"
    facts = {"gpus": which, "machine": on.machine, "platform": jax.default_backend()}
    return Run(
        on={**facts, "jax": on.jax, "nccl": on.nccl, "date": on.date},
        workload={name: getattr(options, name) for name in names} | capacity,
        tokens=tokens,
        flops=float(tokens * training.config.flops_per_token(options.seq)),
        gpus=gpus(options),
        peak_flops=known.peak_flops if known else 0.0,
        results=[],
    )


def timed(program: Program, clocks: Clocks, state: Any, batch: Any) -> Any:
    """Runs and times one step, records it in the program's result, and returns the new state."""
    start = time.perf_counter()
    state, _ = jax.block_until_ready(program.compiled(state, batch))
    end = time.perf_counter()
    program.result.steps_ms.append((end - start) * 1e3)
    found = clocks.between(start, end)
    if found is not None:
        program.result.mhz.append(found.mhz)
        program.result.watts.append(found.watts)
    return state


def traced(compiled: Callable[..., Any], state: Any, batch: Any, module: Any) -> trace.TraceReport:
    """Traces one step and analyses its first GPU."""
    options: Any = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # GPU events only; the host's are many
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(compiled(state, batch))
        return trace.analyse(trace.load(folder), module=module)


def add_trace(result: Result, report: trace.TraceReport) -> None:
    result.span_ms, result.busy_ms, result.compute_ms = report.span_ms, report.busy_ms, report.compute_ms
    result.communication_ms, result.hidden_ms = report.communication_ms, report.hidden_ms
    result.copies_ms = report.copies_ms


def first_line(error: Exception) -> str:
    """The error in one line. If XLA wraps a pass's error with its traceback, the line of the pass's error."""
    text = str(error)
    if "Traceback (most recent call last)" in text:
        raised = [line for line in text.splitlines() if re.match(r"[\w.]+: \S", line)]
        return (raised[-1] if raised else text)[:400]
    return f"{type(error).__name__}: {text}".partition("\n")[0][:400]


def main(kind: Callable[[Namespace], Worker] = Worker) -> None:
    """Does the work of a process. `kind` makes the worker from the process's options."""
    options = Namespace(**json.loads(sys.argv[1]))
    if options.on_paper:
        deviceless.prepare_environment()
    if hasattr(options, "coordinator"):
        nodes = SETTINGS[options.setting].nodes
        jax.distributed.initialize(options.coordinator, nodes, options.process, local_device_ids=options.devices)
    work(kind(options))


def work(worker: Worker) -> None:
    """Runs all parts; waits for the next turn after each."""
    for _ in worker.parts():
        end_part()
    worker.save()


if __name__ == "__main__":
    main()
