"""Communication volumes from model and mesh: table 1 of DHelix, and what the project's own meshes send."""

import pytest

from dhelix.benchmarks.prediction.volumes import TABLE_1, Parallelism, local_and_across, volumes
from dhelix.models import preset
from dhelix.profiles.papers.published import DHELIX_TABLE_1

MODEL = preset("llama-3.1-405b")


@pytest.mark.parametrize("column", TABLE_1)
def test_the_printed_volumes_follow(column: str) -> None:
    printed = {p.quantity: p.value for p in DHELIX_TABLE_1 if p.workload.endswith(f"GPUs, {column}") and p.unit == "GB"}
    found = local_and_across(volumes(MODEL, TABLE_1[column], as_printed=True))
    names = "local communication", "cross-node communication"
    for name, volume in zip(names, found, strict=True):
        last_digit = 0.1 if printed[name] < 10 else 1.0
        assert volume / 2**30 == pytest.approx(printed[name], abs=0.6 * last_digit)


def test_context_parallelism_divides_the_sequence() -> None:
    whole, split = (Parallelism(8, 8, 16, 16, 8192 * cp, cp) for cp in (1, 16))
    one, other = (volumes(MODEL, mesh) for mesh in (whole, split))
    assert one["tensor"] == other["tensor"] and one["context"] == 0.0 < other["context"]
    assert other["context"] < volumes(MODEL, split, as_printed=True)["context"] / 15


def test_one_device_sends_nothing() -> None:
    assert not any(volumes(MODEL, Parallelism(1, 1, 1, 4, 8192)).values())
