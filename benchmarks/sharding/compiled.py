"""Compiles steps with sharded states for GPUs that need not exist, and reads their memory and their collectives.

    found = compile_case(Case("llama-7b", 64, "zero1", 2))
    found["arguments"], found["temporaries"], found["collectives"]      # bytes of one device

The step is that of `models.train_step` with AdamW: float32 states, bfloat16 compute, one sequence of 4096 tokens for
each device and micro-batch. It runs under the decorator: with two strands, or in the order of `schedule="intra_batch"`
if there is one micro-batch.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import optax

import dhelix
from dhelix.benchmarks.sharding.cases import SEQUENCE, Case
from dhelix.models.presets import preset
from dhelix.models.train_step import make_train_step
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.analysis.execution import instructions
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler import deviceless

_SCALARS = 64
"""Bytes up to which a collective counts as one of losses and norms."""


def compile_case(case: Case, target: str = "h200") -> dict[str, Any]:
    """What a step needs and sends, in bytes of one device.

    Returns:
      `arguments`, `temporaries` (with results that reuse no argument), `collectives` by kind without those of a few
      scalars, and `seconds`, the time to lower and compile.
    """
    began = time.perf_counter()
    mesh = deviceless.mesh({"dp": case.gpus, "tp": 1}, target)
    config = preset(case.model, seq=SEQUENCE)
    training = make_train_step(config, mesh, optax.adamw(1e-3), case.microbatches, case.sharding)  # type: ignore[arg-type]
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        training.abstract_state(),
        dhelix.state_shardings(training.abstract_state(), case.strategy),
    )
    batch = training.abstract_batch(case.gpus * case.microbatches)
    schedule = "intra_batch" if case.microbatches == 1 else "dp"
    step = dhelix.strand_interleave(donate_argnums=0, sharding=case.strategy, schedule=schedule)(training.train_step)
    compiled = deviceless.compile(step.lower(state, batch))
    memory: Any = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "collectives": collective_bytes(HloModule.from_text(compiled.as_text() or "")),
        "seconds": round(time.perf_counter() - began, 1),
    }


def collective_bytes(module: HloModule) -> dict[str, int]:
    """Bytes of a step's collectives by kind, as `Collective.size` counts them, without those of a few scalars."""
    found: dict[str, int] = {}
    for instruction, visit in instructions(module.entry):
        collective = find_collective(instruction)
        for one in (collective, *collective.others) if collective else ():
            if one.size > _SCALARS:
                found[one.kind] = found.get(one.kind, 0) + visit.count * one.size
    return found
