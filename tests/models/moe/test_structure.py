"""Steps with experts, compiled for GPUs that need not exist: one merged loop, one activation budget, two streams."""

import dataclasses
import re
from pathlib import Path

import optax
import pytest

from dhelix import strand_interleave
from dhelix.models.moe.moe_config import MOE_PRESETS
from dhelix.models.train_step import Sharding, make_train_step
from dhelix.runtime.compiler import deviceless

WIDE = dataclasses.replace(
    MOE_PRESETS["phi-moe-42b"], layers=4, vocab=4096, hidden=2048, heads=16, kv_heads=8, ffn=2048, seq=4096
)
CASES: list[tuple[dict[str, int], Sharding]] = [
    ({"dp": 1, "ep": 4, "tp": 1}, "shard_map"), ({"dp": 4, "ep": 2, "tp": 1}, "fsdp"),
    ({"dp": 4, "ep": 2, "tp": 8}, "shard_map"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(("axes", "sharding"), CASES, ids=str)
def test_experts_become_strands(axes: dict[str, int], sharding: Sharding, tmp_path: Path) -> None:
    """On several nodes of 8 GPUs, the all-to-alls over `ep` run on a stream beside the collectives over `tp`."""
    training = make_train_step(WIDE, deviceless.mesh(axes), optax.sgd(0.1), 4, sharding)
    options = {**deviceless.COMPILER_OPTIONS, "xla_dump_to": str(tmp_path)}
    step = strand_interleave(training.train_step, donate_argnums=0, strict=True, compiler_options=options)
    arguments = training.abstract_state(), training.abstract_batch(4 * axes["dp"] * axes["ep"])
    found = step.report(*arguments)
    strands = next(note for note in found["strand-duplication"].notes if note.message == "two strands")
    assert len(strands.facts["merged_loops"]) == 1
    assert [note.message for note in found["activation-sharing"].notes] == [
        "residuals of both strands share one buffer"
    ]
    assert found.gain is not None and found.gain.after.memory <= 1.03 * found.gain.before.memory
    (sequence,) = tmp_path.glob("*__dhelix_*thunk_sequence.txt")
    streams = set(re.findall(r"communication_stream\[(\d)\]", sequence.read_text()))
    assert streams == ({"0", "1"} if axes["tp"] > 1 else {"0"})
    assert found["stream-assignment"].changed == (axes["tp"] > 1)
