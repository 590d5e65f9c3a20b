"""Messages of a pipelined Llama that XLA compiles for GPUs: the work that each exchange overlaps with."""

from typing import Any

import optax
import pytest

from dhelix import strand_interleave
from dhelix.launch.train.meshes.pipelined import make_pipelined_step
from dhelix.models import make_mesh, preset
from dhelix.passes.analysis.execution import sequence_of
from dhelix.passes.analysis.names import ALPHA, BETA
from dhelix.passes.hlo import Computation, graph
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import compiled_module

MICROBATCHES = 4


def ticks(of: str, layers: int = 8, sends_beside: bool = False, **order: Any) -> list[list[str]]:
    """For each loop over ticks, its launches in order: exchanges, loops over layers, and updates outside of these."""
    config = preset("llama-8b", layers, seq=4096, vocab=1024)
    mesh = make_mesh(1, 1, deviceless.topology("h200", "1x1x2").devices, pp=2)
    training = make_pipelined_step(config, mesh, optax.sgd(0.1), MICROBATCHES, of, sends_beside=sends_beside)
    options: Any = {"pipeline": training.fold, "microbatches": MICROBATCHES, **(order or {"passes": ()})}
    step = strand_interleave(training.train_step, **options)
    lowered = step.lower(training.abstract_state(), training.abstract_batch(MICROBATCHES))
    module = compiled_module(deviceless.compile(lowered))
    loops = [i.called[0] for i in sequence_of(module.entry) if i.opcode == "while"]
    return [found for body in loops if set(found := events(body)) - {"update"}]


def events(body: Computation) -> list[str]:
    found = []
    for instruction in sequence_of(body):
        if instruction.name.startswith("collective-permute") or instruction.opcode.startswith("collective-permute"):
            found.append(next((end for end in ("start", "done") if end in instruction.name), "exchange"))
        elif instruction.opcode == "while":
            products = [i.op_name for i in graph.walk(instruction.called[0]) if "dot_general" in i.op_name]
            found += [strand for strand in (BETA, ALPHA) if any(f"/{strand}/" in name for name in products)]
        elif "dynamic_update_slice" in instruction.op_name:
            found.append("update")
    return found


@pytest.mark.slow
@pytest.mark.deviceless
def test_under_interleaved_1f1b_messages_travel_beside_the_next_tick() -> None:
    assert ["start", BETA, "done", "start", ALPHA, "done"] in ticks("interleaved")


@pytest.mark.slow
@pytest.mark.deviceless
def test_under_1f1b_nothing_is_received_before_both_stages_are_done() -> None:
    """A receive that waits while a loop runs would take a part of the GPU from the loop."""
    (tick,) = ticks("1f1b")
    assert tick[:2] == [BETA, ALPHA]


@pytest.mark.slow
@pytest.mark.deviceless
def test_in_an_si_block_messages_may_leave_beside_its_last_layers() -> None:
    """In this program they overlap with writes of residuals and sums of gradients."""
    found = ticks("w", layers=12, sends_beside=True, schedule="dp")
    steady = next(tick for tick in found if {BETA, ALPHA} < set(tick))
    assert steady[:2] == [BETA, ALPHA]
    starts, dones = ([n for n, event in enumerate(steady) if event == end] for end in ("start", "done"))
    assert len(starts) == len(dones) == 2
    assert all("update" in steady[start:done] for start, done in zip(starts, dones, strict=True))
