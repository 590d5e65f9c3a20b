"""All-gathers as all-to-alls of copies: the same bits on CPU devices, and only if measured to be faster."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.passes.communication.all_gather_decomposition import AllGatherDecomposition
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo

BOTH = PartitionSpec(("dp", "tp"))


def gathered(axes: str | tuple[str, ...], dimension: int, dtype: Any) -> tuple[jax.stages.Lowered, jax.Array]:
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("dp", "tp"))

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x[0] * 3, axes, axis=dimension, tiled=True)[None]

    numbers = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3, 5, 2)), dtype)
    argument = jax.device_put(numbers, NamedSharding(mesh, BOTH))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=BOTH, out_specs=BOTH, check_vma=False)
    return jax.jit(mapped).lower(argument), argument


@pytest.mark.parametrize("axes", ["tp", "dp", ("dp", "tp")])
@pytest.mark.parametrize(("dimension", "dtype"), [(0, "bfloat16"), (1, "float32"), (2, "int32")])
def test_every_device_has_the_same_bits(axes: str | tuple[str, ...], dimension: int, dtype: str) -> None:
    lowered, argument = gathered(axes, dimension, dtype)
    module = HloModule.from_bytes(hlo_bytes(lowered))
    assert AllGatherDecomposition(min_bytes=0).run(module, PassContext())
    opcodes = [i.opcode for c in module.computations for i in c.instructions]
    assert "all-gather" not in opcodes and "all-to-all" in opcodes
    expected, actual = lowered.compile()(argument), with_hlo(lowered, module.to_bytes()).compile()(argument)
    for one, other in zip(expected.addressable_shards, actual.addressable_shards, strict=True):
        np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))


TEXT = """
HloModule m, num_partitions=4
ENTRY e { x = bf16[8192,1024] parameter(0)
  ROOT y = bf16[32768,1024] all-gather(x), channel_id=1, use_global_device_ids=true, replica_groups={{0,1,2,3}},
    dimensions={0} }
"""


@pytest.mark.parametrize(("link", "pays"), [("nvlink", False), ("no-p2p", True)])
def test_measured_costs_decide(link: str, pays: bool) -> None:
    """64 MiB: over NVLink both ways take equally long; through host memory the all-to-all is faster."""
    context = PassContext()
    changed = AllGatherDecomposition(CostModel.find("H200", link)).run(HloModule.from_text(TEXT), context)
    assert changed == pays
    assert len(context.notes) == 1


def test_groups_must_say_how_many_parts_there_are() -> None:
    context = PassContext()
    assert not AllGatherDecomposition().run(HloModule.from_text(TEXT.replace("{{0,1,2,3}}", "{}")), context)
    assert "groups" in context.notes[0].message
