"""Places of messages in the program that XLA schedules for GPUs."""

import jax
import optax
import pytest

from dhelix import strand_interleave
from dhelix.launch.train.meshes.pipelined import make_pipelined_step
from dhelix.models import make_mesh, preset
from dhelix.passes.analysis.collectives import find_collective, is_done, is_start, start_of
from dhelix.passes.hlo import Instruction
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import compiled_module

STAGES, MICROBATCHES = 2, 4


def is_message(instruction: Instruction) -> bool:
    found = find_collective(instruction)
    return found is not None and found.kind == "collective-permute"


@pytest.mark.slow
@pytest.mark.deviceless
def test_messages_of_interleaved_1f1b_lie_beside_layers_though_stages_share_the_ends() -> None:
    """Loops over an end that all stages share hold collectives, and XLA overlaps no such loop with a message."""
    mesh = make_mesh(1, 1, deviceless.topology("h200", f"1x1x{STAGES}").devices, pp=STAGES)
    config = preset("llama-demo", 8, seq=128, vocab=64)
    training = make_pipelined_step(config, mesh, optax.sgd(0.1), MICROBATCHES, "interleaved", 2, shared_ends=True)
    step = strand_interleave(training.train_step, passes=(), pipeline=training.fold, microbatches=MICROBATCHES)
    lowered: jax.stages.Lowered = step.lower(training.abstract_state(), training.abstract_batch(MICROBATCHES))
    module = compiled_module(deviceless.compile(lowered))
    beside: list[list[bool]] = []
    for sequence in module.schedule.values():
        place = {instruction: n for n, instruction in enumerate(sequence)}
        loops = [n for instruction, n in place.items() if instruction.opcode == "while"]
        ends = {start_of(i): n for i, n in place.items() if is_done(i)}
        sent = [i for i in sequence if is_start(i) and is_message(i)]
        if len(sent) > 1:  # a round of a forward tick and a backward tick
            beside.append([any(place[start] < loop < ends[start] for loop in loops) for start in sent])
    assert beside == [[True, True]]
