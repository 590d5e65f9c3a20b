"""Steps over several mesh axes, compiled for GPUs that need not exist: merged loops, activation budgets, streams."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import optax
import pytest

from dhelix import strand_interleave
from dhelix.models.common.context_parallel import Exchange
from dhelix.models.llama.llama_config import LLAMA_PRESETS
from dhelix.models.moe.moe_config import MOE_PRESETS
from dhelix.models.train_step import Sharding, make_train_step
from dhelix.passes.analysis.names import INSIDE
from dhelix.passes.framework.report import Report
from dhelix.runtime.compiler import deviceless

SIZES: dict[str, Any] = {"layers": 4, "vocab": 4096, "hidden": 2048, "heads": 16, "kv_heads": 8}
EXPERTS = dataclasses.replace(MOE_PRESETS["phi-moe-42b"], **SIZES, ffn=2048, seq=4096)
LONG = dataclasses.replace(LLAMA_PRESETS["llama-8b"], **SIZES, ffn=4096, seq=16384)

pytestmark = [pytest.mark.slow, pytest.mark.deviceless]


def compiled(
    config: Any, axes: dict[str, int], folder: Path, topology: str = "", sharding: Sharding = "shard_map", **more: Any
) -> tuple[Report, set[str]]:
    """The report of the step with strands, and the numbers of its communication streams."""
    mesh = deviceless.mesh(axes, "h200", topology) if topology else deviceless.mesh(axes)
    training = make_train_step(config, mesh, optax.sgd(0.1), 4, sharding, **more)
    options = {**deviceless.COMPILER_OPTIONS, "xla_dump_to": str(folder)}
    step = strand_interleave(training.train_step, donate_argnums=0, strict=True, compiler_options=options)
    rows = 4 * axes["dp"] * axes.get("ep", 1)
    found = step.report(training.abstract_state(), training.abstract_batch(rows))
    (sequence,) = folder.glob("*__dhelix_*thunk_sequence.txt")
    return found, set(re.findall(r"communication_stream\[(\d)\]", sequence.read_text()))


def assert_strands(found: Report, inside: str = "") -> None:
    """One merged loop over layers, in the memory of the plain step. `inside`: trip counts of merged loops in it."""
    strands = next(note for note in found["strand-duplication"].notes if note.message == "two strands")
    layers, *others = strands.facts["merged_loops"]
    assert layers.endswith(" x 4")
    assert [re.sub(".* x ", "", loop) for loop in others if loop.startswith(INSIDE)] == inside.split()
    assert len(others) == len(inside.split())
    assert [note.message for note in found["activation-sharing"].notes] == [
        "residuals of both strands share one buffer"
    ]
    assert found.gain is not None and found.gain.after.memory <= 1.03 * found.gain.before.memory


@pytest.mark.parametrize(
    ("axes", "sharding"),
    [
        ({"dp": 1, "ep": 4, "tp": 1}, "shard_map"),
        ({"dp": 4, "ep": 2, "tp": 1}, "fsdp"),
        ({"dp": 4, "ep": 2, "tp": 8}, "shard_map"),
    ],
    ids=str,
)
def test_experts_become_strands(axes: dict[str, int], sharding: Sharding, tmp_path: Path) -> None:
    """On several nodes of 8 GPUs, the all-to-alls over `ep` run on a stream beside the collectives over `tp`."""
    found, streams = compiled(EXPERTS, axes, tmp_path, sharding=sharding)
    assert_strands(found)
    assert streams == ({"0", "1"} if axes["tp"] > 1 else {"0"})
    assert found["stream-assignment"].changed == (axes["tp"] > 1)


@pytest.mark.parametrize("context", ["ring", "all-gather"])
def test_long_sequences_become_strands(context: Exchange, tmp_path: Path) -> None:
    """On two nodes of 4 GPUs, keys and values travel between nodes beside the collectives over `tp`."""
    found, streams = compiled(LONG, {"dp": 1, "cp": 2, "tp": 4}, tmp_path, "1x2x4", context=context)
    assert_strands(found)
    assert streams == {"0", "1"} and found["stream-assignment"].changed
    assert found.gain is not None and found.gain.ratio < 0.9


def test_scanned_rings_become_strands(tmp_path: Path) -> None:
    """The rings of both strands become one loop in the loop over layers. In each step, a send spans an attention."""
    found, _ = compiled(LONG, {"dp": 1, "cp": 8, "tp": 1}, tmp_path, context="scanned-ring")
    assert_strands(found, inside="5")
    (scheduled,) = tmp_path.glob("*__dhelix_*gpu_after_optimizations.txt")
    bodies = [body for body in scheduled.read_text().split("\n\n") if "__cudnn$fmha" in body and " while(" not in body]
    assert len(bodies) == 3  # both strands, and the forward and the backward pass that run alone
    for body in bodies:
        assert re.search(r"%(collective-permute-start\S*) = .*__cudnn\$fmha.*async-done\(%\1\)", body, re.DOTALL)
