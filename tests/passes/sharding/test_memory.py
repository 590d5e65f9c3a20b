"""Memory of a device: model states under factors, activations, temporary buffers."""

from __future__ import annotations

import pytest

from dhelix.passes.sharding.memory import activation_bytes, memory
from dhelix.passes.sharding.sizes import MIXED, SINGLE, Batch
from dhelix.tests.passes.sharding.models import LLAMA_7B, LLAMA_30B, factors, llama

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
