"""The step without communication has local copies in place of collectives, and keeps its products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dhelix.benchmarks.programs.structure import Case, lower
from dhelix.benchmarks.strands.no_communication import NoCommunication
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.runtime.compiler import deviceless, lowering
from dhelix.runtime.compiler.registration import Session

SMALL = {"vocab": 8192, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 3072, "seq": 2048}


def test_each_device_keeps_its_own_part() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), "x")

    def local(x: jax.Array):
        gathered = lax.all_gather(x, "x", axis=1, tiled=True)
        scattered = lax.psum_scatter(gathered * 2, "x", scatter_dimension=1, tiled=True)
        exchanged = lax.all_to_all(gathered, "x", 1, 1, tiled=True)
        return (
            gathered,
            scattered,
            lax.psum(x, "x"),
            exchanged,
            lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]),
        )

    spec = PartitionSpec("x")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec,) * 5))
    x = jnp.arange(24.0).reshape(4, 6)
    lowered = step.lower(x)
    module = lowering.hlo_bytes(lowered)
    changed, report = PassManager([_AsLowered()], strict=True).run(Stage.LOWERED, module)
    assert changed is not None
    assert len(report.passes[0].notes) == 5
    compiled = lowering.with_hlo(lowered, changed).compile()
    assert all(
        kind not in (compiled.as_text() or "") for kind in ("all-gather(", "all-reduce(", "all-to-all(", "permute(")
    )
    gathered, scattered, summed, exchanged, sent = compiled(x)
    repeated = np.tile(np.asarray(x), 4)
    np.testing.assert_array_equal(gathered, repeated)
    np.testing.assert_array_equal(scattered, 2 * np.asarray(x))
    np.testing.assert_array_equal(summed, x)
    np.testing.assert_array_equal(exchanged, repeated)
    np.testing.assert_array_equal(sent, x)


class _AsLowered(NoCommunication):
    stage = Stage.LOWERED


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_train_step_compiles_without_collectives_and_keeps_its_products() -> None:
    lowered = lower(Case("small", layers=2, microbatches=2, overrides=SMALL))
    module = lowering.hlo_bytes(lowered)
    session = Session(PassManager([NoCommunication()], strict=True), module, "jit_step")
    with session.compiling():
        ours = deviceless.compile(lowering.with_hlo(lowered, module, session.module_name))
    found = [lowering.compiled_module(c) for c in (ours, deviceless.compile(lowered))]
    collectives, products = ([sum(map(test, _instructions(m))) for m in found] for test in (_communicates, _multiplies))
    assert collectives[0] == 0 < collectives[1]
    assert products[0] == products[1] > 0


def _instructions(module):
    return [i for c in module.computations for i in c.instructions]


def _communicates(instruction) -> bool:
    return find_collective(instruction) is not None


def _multiplies(instruction) -> bool:
    return "matmul" in instruction.proto.custom_call_target or instruction.opcode == "dot"
