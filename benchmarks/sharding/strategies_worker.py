"""A process of `strategies.py`: `strands/worker.py` for programs with their own sharding of states.

Programs of one strategy hand a state on, whatever their number of micro-batches. Before anything is measured, the
planner chooses a strategy for each number of micro-batches, as it does for a user (`dhelix.plan_sharding`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

from dhelix import plan_sharding, sharding_plan, strand_interleave
from dhelix.benchmarks.sharding.programs import AT_ONCE, MICROBATCHES, PROGRAMS, ROWS, Program
from dhelix.benchmarks.strands.results import Run
from dhelix.benchmarks.strands.worker import Worker, describe, main, traced
from dhelix.launch.train.meshes.sharded import with_states
from dhelix.models import Training, preset
from dhelix.models.common.mesh import make_mesh
from dhelix.models.train_step import make_train_step
from dhelix.passes.hlo import Instruction
from dhelix.passes.sharding.planner import Candidate
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.sharding.state_plan import StatePlan


class StrategiesWorker(Worker):
    """The programs of one launch setting."""

    variants = PROGRAMS

    def __init__(self, options: Namespace) -> None:
        self.trainings: dict[tuple[str, int], Training] = {}
        super().__init__(options)

    def make_training(self) -> Training:
        return self.made("dp", max(MICROBATCHES))

    def describe(self) -> Run:
        run = describe(self.options, self.training)
        run.workload = {name: run.workload[name] for name in ("preset", "layers", "seq", "vocab", "dp")}
        return run

    def made(self, strategy: str, microbatches: int) -> Training:
        """The train step of a strategy. "dp" is the step that a user writes, for all strategies but XLA's FSDP."""
        key = strategy, microbatches
        if key not in self.trainings:
            o = self.options
            config = preset(o.preset, o.layers, seq=o.seq, vocab=o.vocab)
            if o.on_paper:
                nodes = self.setting.nodes
                mesh = deviceless.mesh({"dp": o.dp, "tp": 1}, o.hardware.lower(), f"1x{nodes}x{o.dp // nodes}")
            else:
                mesh = make_mesh(o.dp, 1)
            by_xla = strategy == "fsdp"
            step = make_train_step(config, mesh, optax.adamw(1e-4), microbatches, "fsdp" if by_xla else "auto")
            self.trainings[key] = step if by_xla else with_states(step, _plan(strategy))
        return self.trainings[key]

    def training_of(self, variant: Program) -> Training:
        return self.made(variant.strategy, max(MICROBATCHES))  # whose state all programs of the strategy can take

    def parts(self) -> Iterator[None]:
        """All parts, with a pause before the first one that needs the GPUs."""
        self.compile_all()
        if self.options.on_paper:
            return self.predict_all()
        yield
        self.check()
        self.say("first steps done")
        for turn, _ in enumerate(self.turns()):
            yield
            self.say(f"round {turn + 1}")
        self.trace_all()

    # --- Compiling.

    def compile_all(self) -> None:
        self.run.workload["planned"] = {str(m): self.planned(m) for m in MICROBATCHES}
        self.save()
        super().compile_all()

    def planned(self, microbatches: int) -> dict[str, Any]:
        """The planner's choice, and the milliseconds that it expects of each strategy."""
        training = self.made("dp", microbatches)
        example = training.abstract_state(), training.abstract_batch(self.options.dp * microbatches)
        if training.mesh.devices.flat[0].platform == "cpu":
            return {"chosen": "", "expected_ms": {}}  # the planner knows GPUs only
        found = plan_sharding(
            training.train_step, *example, microbatches=microbatches, profile=self.setting.costs().profile
        )
        compiled = found.planned.compiled
        times = {_named(c): round(1e3 * compiled.get(c.factors, c.times.step), 2) for c in found.planned.candidates}
        chosen = _named(found.planned.best)
        self.say(f"M {microbatches}: planned {chosen} of {times}")
        return {"chosen": chosen, "expected_ms": times}

    def build(self, variant: Program) -> tuple[Any, dict[str, str], float]:
        training = self.made(variant.strategy, variant.microbatches)
        example = training.abstract_state(), training.abstract_batch(self.options.dp * variant.microbatches)
        if variant.kind == "XLA":
            lowered, options = jax.jit(training.train_step, donate_argnums=0).lower(*example), {}
            if variant.guided:
                guide = self.guide(self.xla(lowered, {}), f"_m{variant.microbatches}")
                options["xla_gpu_pgle_profile_file_or_directory_path"] = guide
                options["xla_gpu_enable_latency_hiding_scheduler"] = True
            return self.xla(lowered, options), {}, 0.0
        step = strand_interleave(
            training.train_step,
            sharding=_plan(variant.strategy),
            schedule="intra_batch" if variant.microbatches == 1 else "dp",
            disable=("parameter-gathering",) if variant.by == AT_ONCE else (),
            profile=self.setting.costs().profile,
            donate_argnums=0,
        )
        return self.compile_step(step, {}, example)

    # --- Running.

    def check(self) -> None:
        batches = {m: self.one_batch(m) for m in MICROBATCHES}
        for program in self.programs:
            program.compiled = WithBatch(program.compiled, batches[program.variant.microbatches])
        super().check()

    def batches(self, training: Training, count: int) -> list[Any]:
        """Nothing for each step, because a program has its own batch (`WithBatch`)."""
        return [None] * count

    def one_batch(self, microbatches: int) -> dict[str, jax.Array]:
        training = self.made("dp", microbatches)
        shape = (self.options.dp * microbatches, self.options.seq + 1)
        tokens = np.random.default_rng(0).integers(0, training.config.vocab, shape, "int32")
        return {"tokens": jax.device_put(tokens, training.batch_sharding)}

    def trace_all(self) -> None:
        """Traces the programs that gather parameters in different ways."""
        on_gpus = jax.default_backend() == "gpu"
        for program in [p for p in self.programs if p.variant.traced and on_gpus]:
            try:
                state = jax.block_until_ready(self.training_of(program.variant).init(jax.random.key(0)))
                module = compiled_module(program.compiled.program)
                report = traced(program.compiled, state, None, module)
                moves = {i.name for c in module.computations for i in c.instructions if _moves_parameters(i)}
                gathers = [c for c in report.collectives if c.instruction in moves]
                program.result.span_ms, program.result.compute_ms = report.span_ms, report.compute_ms
                program.result.communication_ms, program.result.hidden_ms = report.communication_ms, report.hidden_ms
                self.run.workload.setdefault("gathers", {})[program.variant.name] = {
                    "ms": sum(c.total_ms for c in gathers),
                    "hidden_ms": sum(c.hidden_ms for c in gathers),
                }
            except Exception as error:
                self.say(f"{program.variant.name}: no trace: {error}")
            self.save()


def _plan(strategy: str) -> StatePlan:
    return sharding_plan("zero1", groups={"embedding": "zero3"}) if strategy == ROWS else sharding_plan(strategy)


def _moves_parameters(instruction: Instruction) -> bool:
    """Whether an instruction gathers parameters, or brings rows of the embedding. Backward moves gradients."""
    name, source = instruction.name, instruction.op_name
    return "transpose(" not in source and ("all-gather" in name or ("reduce-scatter" in name and "jvp(" in source))


def _named(candidate: Candidate) -> str:
    """The name among STRATEGIES."""
    name = candidate.factors.strategy or str(candidate.factors)
    return "zero3" if name == "fsdp" else name


class WithBatch:
    """A compiled step that knows its batch."""

    def __init__(self, program: Any, batch: Any) -> None:
        self.program, self.batch = program, batch

    def __call__(self, state: Any, _: Any) -> Any:
        return self.program(state, self.batch)


if __name__ == "__main__":
    main(StrategiesWorker)
