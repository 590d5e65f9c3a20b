"""Swaps as all-gathers of pairs: the same bits on CPU devices, and only if measured to be faster."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.passes.communication.exchange import faster
from dhelix.passes.communication.permute_decomposition import PermuteDecomposition
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo

AXES = ("pp", "dp", "tp")
ALL = PartitionSpec(AXES)


def swapped(axis: str, ways: list[tuple[int, int]], dtype: Any = jnp.float32) -> tuple[jax.stages.Lowered, jax.Array]:
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 2, 2), AXES)

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x[0] * 3, axis, ways)[None]

    argument = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3, 5)) * 9, dtype)
    argument = jax.device_put(argument, NamedSharding(mesh, ALL))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)
    return jax.jit(mapped).lower(argument), argument


def on(devices: int, module: HloModule) -> HloModule:
    """Sets the device assignment, as XLA's GPU compiler does."""
    module.proto.device_assignment.replica_count = 1
    module.proto.device_assignment.computation_count = devices
    return module


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
def test_every_device_has_the_same_bits(axis: str, dtype: str) -> None:
    lowered, argument = swapped(axis, [(0, 1), (1, 0)], dtype)
    module = on(8, HloModule.from_bytes(hlo_bytes(lowered)))
    assert PermuteDecomposition(min_bytes=0).run(module, PassContext(strict=True))
    module.proto.ClearField("device_assignment")  # JAX sets it itself on CPUs
    opcodes = [i.opcode for c in module.computations for i in c.instructions]
    assert "collective-permute" not in opcodes and "all-gather" in opcodes
    expected, actual = lowered.compile()(argument), with_hlo(lowered, module.to_bytes()).compile()(argument)
    np.testing.assert_array_equal(np.asarray(expected), np.asarray(actual))


@pytest.mark.parametrize("ways", [[(0, 1)], [(0, 0), (1, 1)]])
def test_what_does_not_come_back_is_left(ways: list[tuple[int, int]]) -> None:
    module, context = HloModule.from_bytes(hlo_bytes(swapped("pp", ways)[0])), PassContext(strict=True)
    assert not PermuteDecomposition(min_bytes=0).run(module, context)
    assert context.notes[0].message == "left alone: its pairs do not swap"


TEXT = """
HloModule m, num_partitions=4
ENTRY e { x = bf16[4096,4096] parameter(0)
  ROOT y = bf16[4096,4096] collective-permute(x), channel_id=1, source_target_pairs={{0,2},{2,0},{1,3},{3,1}} }
"""


@pytest.mark.parametrize(
    ("link", "setting", "pays"),
    [("nvlink", "default", False), ("no-p2p", "default", False), ("no-p2p", "small-buffers", True)],
)
def test_measured_costs_decide(link: str, setting: str, pays: bool) -> None:
    """32 MiB: over NVLink both take equally long; through host memory with small buffers, the all-gather is faster."""
    model, context = CostModel.find("H200", link, setting), PassContext(strict=True)
    assert [key.kind for key in faster(HloModule.from_text(TEXT), model)] == ["collective-permute"] * pays
    assert PermuteDecomposition(model, overlapped=True).run(on(4, HloModule.from_text(TEXT)), context) == pays
    assert len(context.notes) == 1


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("{{0,2},{2,0},{1,3},{3,1}}", "{{0,1},{1,2},{2,3},{3,0}}", "its pairs do not swap"),
        (
            "{{0,2},{2,0},{1,3},{3,1}}",
            "{{0,3},{3,0},{1,2},{2,1}}",
            "its pairs are not an axis of a row-major mesh",
        ),
        ("{{0,2},{2,0},{1,3},{3,1}}", "{{0,2},{2,0}}", "its pairs do not cover all devices"),
        ("{{0,2},{2,0},{1,3},{3,1}}", "{{0,1},{1,0}}", "its pairs do not cover all devices"),
        ("channel_id=1, ", "", "it runs over replicas, not partitions"),
        ("4096,4096", "16,4096", f"it is smaller than {4 << 20} bytes"),
    ],
)
def test_others_are_left(old: str, new: str, reason: str) -> None:
    context = PassContext(strict=True)
    assert not PermuteDecomposition().run(on(4, HloModule.from_text(TEXT.replace(old, new))), context)
    assert context.notes[0].message == f"left alone: {reason}"


@pytest.mark.parametrize(("replicas", "partitions"), [(0, 0), (2, 4), (1, 8)])
def test_devices_that_are_no_pair_would_get_zeros(replicas: int, partitions: int) -> None:
    module, context = HloModule.from_text(TEXT), PassContext(strict=True)
    module.proto.device_assignment.replica_count = replicas
    module.proto.device_assignment.computation_count = partitions
    assert not PermuteDecomposition().run(module, context)
    assert context.notes[0].message == "left alone: its pairs do not cover all devices"


def test_nothing_measured_leaves_what_is_to_be_hidden() -> None:
    context = PassContext(strict=True)
    assert not PermuteDecomposition(overlapped=True).run(HloModule.from_text(TEXT), context)
    assert "no measured costs" in context.notes[0].message
