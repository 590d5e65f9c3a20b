"""JAX's HLO pass hook passes modules that dhelix can read, and the returned module is the one that runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import xla
from jax.sharding import NamedSharding, PartitionSpec

from dhelix.passes.hlo import HloModule, verify
from dhelix.runtime.compiler import deviceless

pytestmark = pytest.mark.smoke


def test_a_callback_reads_the_scheduled_module_and_its_bytes_are_taken_back() -> None:
    seen: list[HloModule] = []

    def callback(serialized: bytes) -> bytes | None:
        module = HloModule.from_bytes(serialized)
        if "smoke_hook" not in module.name:
            return None
        verify(module)
        seen.append(module)
        return module.to_bytes()

    def smoke_hook(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, carry: jnp.tanh(carry @ x), x)

    x = jnp.asarray(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8))
    plain = jax.jit(smoke_hook)(x)
    jax.clear_caches()
    stage = xla.PipelineStage.POST_SCHEDULER
    xla.register_hlo_module_transformation(callback, name="smoke", stage=stage, platforms="cpu")
    try:
        hooked = jax.jit(smoke_hook)(x)
    finally:
        xla.clear_hlo_module_transformation(name="smoke", stage=stage, platforms="cpu")
    assert len(seen) == 1 and seen[0].is_scheduled
    np.testing.assert_array_equal(plain, hooked)


@pytest.mark.deviceless
def test_a_gpu_program_passes_by_before_and_after_the_scheduler() -> None:
    seen: dict[xla.PipelineStage, HloModule] = {}

    def smoke_hook(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    mesh = deviceless.mesh({"x": 4})
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("x")))
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("x")))
    stages = list(xla.PipelineStage)
    for stage in stages:

        def callback(serialized: bytes, stage: xla.PipelineStage = stage) -> bytes | None:
            module = HloModule.from_bytes(serialized)
            if "smoke_hook" not in module.name:
                return None
            verify(module)
            seen[stage] = module
            return module.to_bytes()

        xla.register_hlo_module_transformation(callback, name="smoke", stage=stage, platforms="cuda")
    try:
        compiled = deviceless.compile(jax.jit(smoke_hook).lower(x, w))
    finally:
        for stage in stages:
            xla.clear_hlo_module_transformation(name="smoke", stage=stage, platforms="cuda")
    assert [seen[stage].is_scheduled for stage in stages] == [
        stage is xla.PipelineStage.POST_SCHEDULER for stage in stages
    ]
    before = {i.opcode for c in seen[xla.PipelineStage.PRE_SCHEDULER].computations for i in c.instructions}
    assert "all-gather" in before
    assert "all-gather-start" in (compiled.as_text() or "")
