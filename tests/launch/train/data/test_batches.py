"""Batches: every row once in an epoch, for any number of hosts, also after a resume with another batch size."""

from itertools import islice

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dhelix.launch.train.data.batches import Batches
from dhelix.launch.train.data.documents import one_after_the_other
from dhelix.launch.train.data.rows import Rows
from dhelix.models import make_mesh

ROWS = Rows(one_after_the_other("numbers", [np.arange(8 * n, 8 * n + 8) for n in range(48)], 0, "none"), 8, True, 1000)


def batches(batch: int = 8, seed: int | None = 0) -> Batches:
    return Batches(ROWS, batch, NamedSharding(make_mesh(dp=2, tp=4), PartitionSpec("dp")), seed)


def test_an_epoch_has_each_row_once_in_an_order_of_its_own() -> None:
    made = batches()
    orders = [[int(made.row(n + epoch * len(ROWS))["tokens"][0]) for n in range(len(ROWS))] for epoch in range(3)]
    assert all(sorted(order) == [8 * n for n in range(48)] for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [int(batches(seed=1).row(n)["tokens"][0]) for n in range(48)] != orders[0]
    assert [int(batches(seed=None).row(n)["tokens"][0]) for n in range(3)] == [0, 8, 16]


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_that_resume_read_each_document_once_in_an_epoch(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of 8 on one host, then batches of 4 on several hosts."""
    seen = [int(row) for arrays in islice(batches(8).after(0), 2) for row in arrays["tokens"][:, 0]]
    for host in range(hosts):
        rest = batches(4)
        monkeypatch.setattr(Batches, "own", tuple(range(4))[host * 4 // hosts : (host + 1) * 4 // hosts])
        own = islice((rest._own(16 + 4 * n) for n in range(100)), 8)  # noqa: SLF001
        seen += [int(row) for arrays in own for row in arrays["tokens"][:, 0]]
    assert sorted(seen) == [8 * n for n in range(48)]


def test_a_host_reads_the_rows_of_its_devices() -> None:
    made = batches()
    arrays = next(made.after(16))
    assert made.own == tuple(range(8)) and isinstance(arrays["tokens"], jax.Array)
    np.testing.assert_array_equal(arrays["tokens"], np.stack([made.row(16 + n)["tokens"] for n in range(8)]))
    np.testing.assert_array_equal(arrays["segments"], np.stack([made.row(16 + n)["segments"] for n in range(8)]))
