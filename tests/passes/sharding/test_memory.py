"""Memory of a device: model states under factors, activations, temporary buffers.

`tests/benchmarks/sharding/test_against_xla.py` compares the memory of a split inside tensors with compiled steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhelix.passes.sharding.factors import Factor, Factors
from dhelix.passes.sharding.memory import Memory, activation_bytes, memory
from dhelix.passes.sharding.sizes import BF16_SUMS, FROZEN, MIXED, SINGLE, Batch, Matrix
from dhelix.tests.passes.sharding.models import LLAMA_7B, LLAMA_30B, factors, llama, with_rows

PHI = LLAMA_7B.parameters


def test_sizes_are_those_of_the_models() -> None:
    assert PHI == 6_738_415_616
    assert LLAMA_30B.parameters == pytest.approx(27.6e9, rel=2e-3)
    assert 3 * LLAMA_7B.flops == pytest.approx(4.6e10, rel=5e-3)  # Megatron's formula, forward and backward


def test_states_take_their_share() -> None:
    found = memory(LLAMA_7B, factors((8, 4), (2, 1), (8, 1), (8, 4)), MIXED, Batch(), 256e6)
    assert found.parameters == 2 * PHI / 2
    assert found.gradients == 2 * PHI / 8
    assert found.optimizer == 12 * PHI / 32
    assert found.total == pytest.approx(sum(found.parts().values()))


@pytest.mark.parametrize(
    "sizes, recompute, gigabytes",
    [(llama(), False, 18.2), (llama(40, 5120, 13_824), False, 28.5), (LLAMA_30B, True, 3.9)],
)
def test_activations_of_the_papers_models(sizes, recompute: bool, gigabytes: float) -> None:
    assert activation_bytes(sizes, Batch(recompute=recompute)) / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_a_trainer_in_single_precision_keeps_a_copy_of_what_is_not_gathered() -> None:
    replicated = factors((8, 4), (1, 1), (1, 1), (8, 4))
    assert memory(LLAMA_7B, replicated, SINGLE, Batch(), 256e6).gathered == 2 * PHI
    assert memory(LLAMA_7B, replicated, MIXED, Batch(), 256e6).gathered == 0
    gathered = memory(LLAMA_7B, factors((8, 4), (8, 4), (8, 4), (8, 4)), SINGLE, Batch(), 256e6).gathered
    assert gathered == 2 * 2 * LLAMA_7B.layer_parameters  # two layers in flight


# ---- split inside tensors, as the program does

MESH = Factor(8, 4)
KNOWN = replace(LLAMA_7B, kept=100_000.0)


def inside(strategy: str, microbatches: int = 1, sizes=KNOWN, kept=SINGLE, recompute: bool = False) -> Memory:
    batch = Batch(microbatches=microbatches, recompute=recompute)
    return memory(sizes, Factors.named(strategy, MESH), kept, batch, 256e6, "inside")


@pytest.mark.parametrize("strategy, share", [("dp", 1), ("zero1", 1), ("zero2", 32), ("zero3", 32)])
def test_only_several_micro_batches_need_sums_of_gradients(strategy: str, share: int) -> None:
    assert inside(strategy, 1).gradients == 2 * PHI / share
    assert inside(strategy, 2).gradients == inside(strategy, 8).gradients == 4 * PHI / share


def test_gradients_of_one_micro_batch_go_right_into_the_shards_of_the_update() -> None:
    assert inside("zero1", kept=BF16_SUMS) == inside("zero2", kept=BF16_SUMS)
    assert inside("zero1", kept=SINGLE).gradients == 2 * PHI, "converted for their sum, they are whole before it"


def test_parameters_are_stored_like_optimizer_states_and_read_as_a_copy() -> None:
    found = inside("zero1")
    assert (found.parameters, found.optimizer, found.gathered) == (4 * PHI / 32, 8 * PHI / 32, 2 * PHI)
    assert inside("zero1", 2).gathered == 2 * PHI + 2 * PHI / 32  # the shards that wait for their gathers
    layer, ends = 2 * LLAMA_7B.layer_parameters, 2 * LLAMA_7B.outside_parameters
    assert inside("zero3").gathered == 2 * PHI / 32 + layer
    assert inside("zero3", 2).gathered == 2 * PHI / 32 + 2 * layer + ends  # both strands gather


def test_a_matrix_whose_first_dimension_does_not_divide_is_transposed_after_its_gather() -> None:
    uneven = replace(KNOWN, matrices=(Matrix(4096, 4096**2), Matrix(11_000, 11_000 * 4096)))
    more = [inside("zero1", m, sizes=uneven).gathered - inside("zero1", m).gathered for m in (1, 2)]
    assert more == [0, 2 * 32 * 11_000 * 4096]  # gradients of a single strand take its place
    assert inside("zero3", sizes=uneven) == inside("zero3")


def test_a_layer_is_recomputed_beside_its_gradients() -> None:
    layer, inputs = 100_000 * 4096, 2 * 4096 * 4096
    assert inside("zero1").activations == 33 * layer
    assert inside("zero1", recompute=True).activations == 32 * inputs + 2 * layer
    generic = replace(KNOWN, kept=None)
    assert inside("zero1", sizes=generic).activations == 33 * 34 * 4096 * 4096


def test_one_strand_is_at_the_layers_or_at_the_head() -> None:
    large = replace(KNOWN, vocabulary=500_000)
    assert inside("dp").logits == 0 and inside("dp").activations == 33 * 100_000 * 4096
    assert inside("dp", sizes=large).logits == 2 * 4096 * 500_000
    assert inside("dp", sizes=large).activations == 32 * 100_000 * 4096
    assert inside("dp", 2).logits == 2 * 4096 * 32_000 and inside("dp", 2).activations == 33 * 100_000 * 4096


def test_frozen_parameters_have_no_gradients() -> None:
    found = inside("zero3", 2, kept=FROZEN)
    assert found.gradients == found.unreduced == found.optimizer == 0


def test_rows_take_the_place_of_a_gathered_table() -> None:
    batch, two = Batch(length=512, microbatches=2), Factors.named("zero3", Factor(2))
    table, rows = (memory(one, two, SINGLE, batch, 256e6, "inside") for one in (KNOWN, with_rows(KNOWN)))
    saved = 2 * (32_000 - 2 * 512) * 4096
    assert table.gathered - rows.gathered == table.unreduced - rows.unreduced == saved
    assert replace(rows, gathered=0, unreduced=0) == replace(table, gathered=0, unreduced=0)
