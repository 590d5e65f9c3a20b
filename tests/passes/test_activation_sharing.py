"""Activation sharing on small HLO modules: one stack of residuals for both strands, or a reason for two."""

import pytest

from dhelix.passes.activation_sharing import ActivationSharing
from dhelix.tests.passes import golden


@pytest.mark.parametrize("name", golden.files("activation_sharing"))
def test_golden(name: str) -> None:
    golden.check(name, ActivationSharing())


def test_an_even_number_of_micro_batches_ends_in_mirrored_slots() -> None:
    golden.check(
        "activation_sharing/one_buffer.hlo",
        ActivationSharing(),
        edits={"microbatches = s32[] constant(3)": "microbatches = s32[] constant(4)"},
        prefix="EVEN",
    )
