"""dhelix: compiler passes for JAX/XLA that hide the communication of distributed LLM training.

    from dhelix import strand_interleave, value_and_grad

    @strand_interleave(microbatches=4, donate_argnums=(0, 1))     # in place of jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)      # in place of jax.value_and_grad

The public names are `strand_interleave`, `value_and_grad`, `Fold` (pipelines), `DhelixError`, `__version__`, and for
sharded states (docs/guide/sharding.md) `plan_sharding`, `sharding_plan`, `mesh_of`, `shard_state`, `gather_state`,
`state_shardings`. `tune` tunes collectives on GPUs (docs/guide/tuning.md).
Two modules are also meant for users, but their interfaces may change between versions. `dhelix.deviceless` makes meshes
of GPUs that this machine does not have. `dhelix.collective_matmul` offers collective matmuls as functions.

Names are loaded on first use, so `dhelix --help` does not import JAX and importing dhelix touches no device.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dhelix.errors import DhelixError
    from dhelix.runtime import collective_matmul
    from dhelix.runtime.compiler import deviceless
    from dhelix.runtime.pipeline.fold import Fold
    from dhelix.runtime.planning.live_plan import plan_sharding
    from dhelix.runtime.planning.simulation import simulate
    from dhelix.runtime.sharding.placed_states import gather_state, shard_state, state_shardings
    from dhelix.runtime.sharding.state_plan import mesh_of, sharding_plan
    from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
    from dhelix.runtime.step.strand_interleave import strand_interleave
    from dhelix.runtime.tuning.tune_step import tune

    __version__: str

__all__ = [
    "DhelixError", "Fold", "collective_matmul", "deviceless", "gather_state", "mesh_of", "plan_sharding",
    "shard_state", "sharding_plan", "simulate", "state_shardings", "strand_interleave", "tune", "value_and_grad",
]  # fmt: skip

_HOMES = {
    "DhelixError": "dhelix.errors",
    "Fold": "dhelix.runtime.pipeline.fold",
    "gather_state": "dhelix.runtime.sharding.placed_states",
    "mesh_of": "dhelix.runtime.sharding.state_plan",
    "plan_sharding": "dhelix.runtime.planning.live_plan",
    "shard_state": "dhelix.runtime.sharding.placed_states",
    "sharding_plan": "dhelix.runtime.sharding.state_plan",
    "simulate": "dhelix.runtime.planning.simulation",
    "state_shardings": "dhelix.runtime.sharding.placed_states",
    "strand_interleave": "dhelix.runtime.step.strand_interleave",
    "tune": "dhelix.runtime.tuning.tune_step",
    "value_and_grad": "dhelix.runtime.step.microbatches.value_and_grad",
}
_MODULES = {"collective_matmul": "dhelix.runtime.collective_matmul", "deviceless": "dhelix.runtime.compiler.deviceless"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("dhelix")
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'dhelix' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
