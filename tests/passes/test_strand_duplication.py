"""Strand duplication on small HLO modules: what it makes of them, and what it leaves."""

import pytest

from dhelix.passes.strand_duplication import StrandDuplication
from dhelix.tests.passes import golden


@pytest.mark.parametrize("name", golden.files("strand_duplication"))
def test_golden(name: str) -> None:
    golden.check(name, StrandDuplication())
