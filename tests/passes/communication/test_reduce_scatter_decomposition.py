"""Reduce-scatters as all-to-alls and sums: the same results on CPU devices, and what the GPU compiler makes of them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix import strand_interleave
from dhelix.passes.communication.reduce_scatter_decomposition import ReduceScatterDecomposition
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo

BOTH = PartitionSpec(("dp", "tp"))
EVERY = ReduceScatterDecomposition(min_bytes=0)


def opcodes(module: HloModule) -> list[str]:
    return [i.opcode for c in module.computations for i in c.instructions]


def scattered(axes: str | tuple[str, ...], dimension: int, dtype: Any) -> tuple[jax.stages.Lowered, jax.Array]:
    """A reduce-scatter over `axes` of a 2 x 4 mesh, and an argument of small whole numbers, whose sums are exact."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("dp", "tp"))

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(x[0] * 3, axes, scatter_dimension=dimension, tiled=True)[None]

    numbers = jnp.asarray(np.random.default_rng(0).integers(-5, 6, (8, 8, 16, 24)), dtype)
    argument = jax.device_put(numbers, NamedSharding(mesh, BOTH))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=BOTH, out_specs=BOTH)).lower(argument), argument


@pytest.mark.parametrize("axes", ["tp", "dp", ("dp", "tp")])
@pytest.mark.parametrize(("dimension", "dtype"), [(0, "bfloat16"), (1, "float32"), (2, "float16")])
def test_the_sum_is_that_of_the_reduce_scatter(axes: str | tuple[str, ...], dimension: int, dtype: str) -> None:
    lowered, argument = scattered(axes, dimension, dtype)
    module = HloModule.from_bytes(hlo_bytes(lowered))
    assert EVERY.run(module, PassContext())
    assert "reduce-scatter" not in opcodes(module)
    changed = with_hlo(lowered, module.to_bytes())
    for expected, actual in zip(
        lowered.compile()(argument).addressable_shards, changed.compile()(argument).addressable_shards, strict=True
    ):
        np.testing.assert_array_equal(np.asarray(expected.data, "float32"), np.asarray(actual.data, "float32"))


def test_bfloat16_is_rounded_once() -> None:
    """Adds 1 and 3 x 1/256. Sums in bfloat16 would lose each of the small numbers."""
    lowered, argument = scattered("tp", 0, "bfloat16")
    small = jnp.full((8, 8, 16, 24), 1 / 768, "bfloat16").at[::4].set(1 / 3)
    module = HloModule.from_bytes(hlo_bytes(lowered))
    EVERY.run(module, PassContext())
    exact = np.asarray(small, "float32").reshape(2, 4, 8, 16, 24)[0, :, 0, 0, 0] * 3
    result = with_hlo(lowered, module.to_bytes()).compile()(jax.device_put(small, argument.sharding))
    rounded = [jnp.asarray(x, "bfloat16").astype("float32") for x in exact]
    assert float(result[0, 0, 0, 0]) == float(jnp.asarray(sum(rounded), "bfloat16"))


TEXT = """
HloModule m, num_partitions=4
reduction { a = {type}[] parameter(0)
  b = {type}[] parameter(1)
  ROOT c = {type}[] {reduction}(a, b) }
ENTRY e { x = {type}[8,64] parameter(0)
  ROOT y = {type}[2,64] reduce-scatter(x), {channel}replica_groups={groups}, dimensions={0}, to_apply=reduction }
"""
PLAIN = {"type": "f32", "reduction": "add", "channel": "channel_id=1, use_global_device_ids=true, ",
         "groups": "{{0,1,2,3}}"}  # fmt: skip
LEFT_ALONE = {
    "its type is not floating point": {"type": "s32"},
    "its reduction is not a sum": {"reduction": "maximum"},
    "it runs over replicas, not partitions": {"channel": ""},
    "its groups are unknown or do not match its shapes": {"groups": "{}"},
}


def written(**changes: str) -> HloModule:
    text = TEXT
    for name, value in (PLAIN | changes).items():
        text = text.replace(f"{{{name}}}", value)
    return HloModule.from_text(text)


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_left_alone(reason: str) -> None:
    context = PassContext()
    assert not EVERY.run(written(**LEFT_ALONE[reason]), context)
    assert [note.message for note in context.notes] == [f"left alone: {reason}"]


def test_small_ones_are_left_alone() -> None:
    assert not ReduceScatterDecomposition(min_bytes=8 * 64 * 4 + 1).run(written(), PassContext())
    assert ReduceScatterDecomposition(min_bytes=8 * 64 * 4).run(written(), PassContext())


@pytest.mark.parametrize(("setting", "rows", "pays"), [("default", 1 << 18, False), ("copy-engine", 1 << 18, True)])
def test_measured_costs_decide(setting: str, rows: int, pays: bool) -> None:
    """64 MiB over NVLink: the all-to-all and the sum pay if copy engines move the data, and not if NCCL kernels do."""
    model = CostModel.find("H200", "nvlink", setting)
    module = HloModule.from_text(
        written().to_text().replace("[8,64]", f"[{rows},64]").replace("[2,64]", f"[{rows // 4},64]")
    )
    assert ReduceScatterDecomposition(model).run(module, PassContext()) == pays


@pytest.mark.deviceless
def test_on_gpus_it_is_an_asynchronous_all_to_all_and_the_sum_is_fused() -> None:
    mesh = deviceless.mesh({"tp": 4})

    @strand_interleave(passes=(ReduceScatterDecomposition(min_bytes=1 << 20),), strict=True)
    @jax.jit
    def step(x: jax.Array, w: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(x: jax.Array, w: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jax.lax.psum_scatter(x @ w, "tp", scatter_dimension=1, tiled=True)
            return residual + y, w.T @ w

        row, split = PartitionSpec(None, "tp"), PartitionSpec(None, None, "tp")
        return jax.shard_map(
            body, mesh=mesh, in_specs=(split, PartitionSpec("tp"), row), out_specs=(row, PartitionSpec("tp"))
        )(x, w, residual)

    def shape(*sizes: int, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    lowered = step.lower(
        shape(1, 8192, 4096, spec=PartitionSpec(None, None, "tp")),
        shape(4096, 1024, spec=PartitionSpec("tp")),
        shape(1, 8192, 1024, spec=PartitionSpec(None, "tp")),
    )
    text = deviceless.compile(lowered).as_text()
    assert text is not None
    assert "reduce-scatter" not in re.sub(r"metadata=\{[^}]*\}|name=\S+", "", text)
    assert len(re.findall(r" all-to-all-start\(", text)) == 1
    entry = text[text.index("ENTRY") :]
    readers = [line for line in entry.splitlines() if re.search(r"\(.*%all-to-all-done", line)]
    assert len(readers) == 1 and "fusion(" in readers[0]
