"""The HLO pass hook of JAX: it hands over a module that dhelix reads, and what it takes back is what runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import xla

from dhelix.passes.hlo import HloModule, verify

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
