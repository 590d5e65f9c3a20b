"""The interleaved train step, compiled for 4, 8 and 64 H200s without any GPU: loops, copies and memory.

Llama-8B shapes, 8 layers, 16 micro-batches. Each case is a test of its own, because it compiles two programs.
`benchmarks/programs/structure.py` prints the numbers of these and more cases; docs/research_log.md quotes them.
"""

from typing import Any

import jax
import pytest

from dhelix.benchmarks.programs.structure import Case, interleave, lower, measure
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.edit import replace_uses
from dhelix.runtime.compiler import lowering
from dhelix.tests.quick import slow_but

MEMORY = 1.03  # largest peak of the interleaved step, relative to the plain one's
# if gathered parameters of both strands are live at once; in XLA's order only, the schedulers keep to 1.03
OF_BOTH = 1.05

CASES = (
    Case("4 GPUs"),
    Case("64 GPUs", dp=8, tp=8),
    Case("4 GPUs, automatic sharding", sharding="auto"),
    Case("4 GPUs, parameters split over dp", dp=4, tp=1, layers=6, sharding="fsdp"),
)

SMALL = {"vocab": 8192, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 3072, "seq": 2048}


@pytest.mark.deviceless
@pytest.mark.parametrize("case", slow_but([CASES[2]], CASES), ids=lambda case: case.name)
def test_one_merged_layer_loop_without_copies_and_with_no_more_memory(case: Case) -> None:
    plain = lower(case)
    strands, _ = interleave(plain)
    interleaved = measure(strands, strands=True)
    found = interleaved.structure
    assert found is not None
    assert (found.layer_loops, found.merged_loops) == (1, 1)
    assert not found.residual_copies
    assert not found.other_copies
    memory = OF_BOTH if case.sharding == "fsdp" else MEMORY
    assert interleaved.peak <= memory * measure(plain, strands=False).peak


@pytest.mark.slow
@pytest.mark.deviceless
def test_unrolled_layers_need_no_more_memory() -> None:
    plain = lower(Case("4 GPUs, unrolled", layers=4, overrides={"scan_layers": False}))
    strands, _ = interleave(plain)
    assert measure(strands, strands=True).peak <= MEMORY * measure(plain, strands=False).peak


@pytest.mark.slow
@pytest.mark.deviceless
def test_copies_are_seen_where_there_are_some() -> None:
    """Without the barrier between the read and the write of a slot, copy insertion copies whole stacks."""
    strands, _ = interleave(lower(Case("small", layers=4, microbatches=4, overrides=SMALL)))
    found = measure(_without_barriers(strands), strands=True).structure
    assert found is not None
    assert found.merged_loops == 1
    assert found.residual_copies


def _without_barriers(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    module = HloModule.from_bytes(lowering.hlo_bytes(lowered))
    for computation in module.computations:
        users = computation.users()
        for barrier in [i for i in computation.instructions if i.opcode == "opt-barrier"]:
            if barrier.operands[0].opcode != "tuple":
                continue
            for read in users[barrier]:
                replace_uses(computation, read, barrier.operands[0].operands[read.tuple_index])
        computation.sort()
    return lowering.with_hlo(lowered, module.to_bytes())


@pytest.mark.deviceless
@pytest.mark.parametrize("remat", slow_but(["full"], ["none", "full"]))
def test_an_unrolled_layer_hands_over_no_more_than_a_scanned_one(remat: str) -> None:
    """Values that backward recomputes stay in backward, although data flow alone would let forward compute them."""

    def per_layer(scan: bool) -> int:
        few, many = (_crossing_bytes(layers, remat=remat, scan_layers=scan) for layers in (2, 4))
        return many - few

    assert 0 < per_layer(scan=False) <= 1.01 * per_layer(scan=True)


def _crossing_bytes(layers: int, **overrides: Any) -> int:
    _, report = interleave(lower(Case("small", layers=layers, overrides={**SMALL, **overrides})))
    return next(n.facts["crossing_bytes"] for n in report.passes[0].notes if "crossing_bytes" in n.facts)
