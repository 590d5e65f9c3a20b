"""DistFuse's figure 4: the hidden share, the table, and the compilation of each way for GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.benchmarks.collectives import overlap_order
from dhelix.runtime.compiler import deviceless

deviceless.prepare_environment()


@pytest.mark.parametrize("together, share", [(500.0, 0.0), (300.0, 1.0), (400.0, 0.5), (550.0, -0.25)])
def test_hidden_is_the_share_of_the_shorter_operation(together, share):
    times = {"tensor": 300.0, "loads": 200.0, "case 1": together}
    assert overlap_order.hidden(times, "case 1") == pytest.approx(share)


def test_table_has_a_line_for_each_way():
    record = {"us": {"tensor": 300.0, "case 1": 450.0}, "hidden": {"case 1": 0.5}}
    assert overlap_order.table(record).splitlines()[1:] == ["tensor         300.0", "case 1         450.0    0.50"]


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["loads", "case 2", "alternating", "split"])
def test_compiles(name):
    here = NamedSharding(deviceless.mesh({"gpu": 1}), P())
    data = jax.ShapeDtypeStruct((1056, 16, 256), jnp.bfloat16, sharding=here)
    steps = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=here)
    compiled = deviceless.compile(overlap_order.program(name, 132).lower(data, steps))
    assert "mosaic_gpu_v2" in (compiled.as_text() or "")
