"""The benchmark of strands with collective matmuls: the programs that it predicts."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.benchmarks.collective_matmul.choice import rows, target_of
from dhelix.errors import DhelixError
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.step.options import StepOptions

AUTO = StepOptions(collective_matmul="auto")


@pytest.mark.deviceless
def test_programs_of_the_table() -> None:
    """In a program without a loop there is nothing to weigh. So all sites that are faster alone are chosen."""
    sharding = NamedSharding(deviceless.mesh({"tp": 4}), P("tp"))
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
    target = target_of(lowered, AUTO)
    found = {name: [one.name for one in manager.passes] for name, manager in rows(lowered, AUTO, target)}
    plain, kernels, strands, everywhere, chosen = found.values()
    assert plain == [] and "all but 0" in list(found)[-1]
    assert "collective-matmul" in kernels and "strand-pairing" not in kernels
    assert "collective-matmul" not in strands and "strand-pairing" in strands
    assert everywhere == chosen and {"collective-matmul", "strand-pairing"} <= set(chosen)
    with pytest.raises(DhelixError, match="give --profile"):
        target_of(lowered, AUTO.but(profile=None))
