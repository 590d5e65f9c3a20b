"""Training of a small model on 8 CPU devices, with states that are whole or sharded.

The step is what a user could have written: a scan over micro-batches, AdamW, clipping by the global norm. With
`manual`, a shard_map computes the gradients, and sums them over data-parallel devices itself. With `tokens`, an
embedding is added to the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.passes.communication.gradient_reduction import GradientReduction
from dhelix.passes.sharding.states.parameter_gathering import ParameterGathering
from dhelix.passes.sharding.states.parameter_prefetch import ParameterPrefetch
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.pass_lists import default_passes
from dhelix.runtime.step.strand_interleave import strand_interleave

LAYERS, WIDTH, HIDDEN, ROWS, TOKENS = 3, 16, 32, 2, 64
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
SPECS = {
    "layers": {"up": P(None, None, "tp"), "bias": P(None, "tp"), "down": P(None, "tp")},
    "embedding": P(None, "tp"),
    "head": P(),
    "gain": P(),
    "odd": P(),
}
"""How "tp" splits the parameters. No plan can split "odd", which has 3 elements, nor the scalar "gain"."""

Tree = Any


def mesh(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def parameters(tokens: bool = False) -> Tree:
    draw = np.random.default_rng(0)

    def normal(*size: int) -> np.ndarray:
        return (draw.standard_normal(size) / 4).astype(np.float32)

    layers = {
        "up": normal(LAYERS, WIDTH, HIDDEN),
        "bias": normal(LAYERS, HIDDEN),
        "down": normal(LAYERS, HIDDEN, WIDTH),
    }
    others = {"head": normal(WIDTH, WIDTH), "gain": np.float32(1.5), "odd": normal(3)}
    return {"layers": layers, **others, **({"embedding": normal(TOKENS, WIDTH)} if tokens else {})}


def loss(params: Tree, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"], None

    if "embedding" in params:
        x = x + params["embedding"][(jnp.abs(x[:, 0]) * 1000).astype(int) % TOKENS]
    y = lax.scan(layer, x, params["layers"])[0] @ params["head"]
    return params["gain"] * jnp.mean((y - jnp.sin(x)) ** 2) + jnp.sum(params["odd"] ** 2)


@dataclass(frozen=True)
class Case:
    """A step on a mesh.

    Attributes:
      mesh: the mesh.
      data: its data-parallel axes.
      microbatches: number of micro-batches.
      manual: whether a shard_map computes the gradients.
      tokens: whether the model has an embedding.
    """

    mesh: Mesh
    data: Sequence[str] = ("dp",)
    microbatches: int = 1
    manual: bool = False
    tokens: bool = False

    def state(self) -> Tree:
        """The first state, whole on all data-parallel devices."""

        def place(spec: P, value: np.ndarray) -> jax.Array:
            known = P(*(axis if axis in self.mesh.shape else None for axis in spec))
            return jax.device_put(value, NamedSharding(self.mesh, known))

        values = parameters(self.tokens)
        specs = {name: SPECS[name] for name in values}
        params = jax.tree.map(place, specs, values, is_leaf=lambda leaf: isinstance(leaf, P))
        return {"params": params, "optimizer": OPTIMIZER.init(params)}

    def batch(self, step: int = 0) -> jax.Array:
        size = (self.microbatches, 8 * ROWS, WIDTH)
        values = np.random.default_rng(1 + step).standard_normal(size).astype(np.float32)
        return jax.device_put(values, NamedSharding(self.mesh, P(None, tuple(self.data))))

    def step(self, state: Tree, batch: jax.Array) -> tuple[Tree, dict[str, jax.Array]]:
        value, gradients = self._of_shard_map(state["params"], batch) if self.manual else mean(state["params"], batch)
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
        metrics = {"loss": value, "norm": optax.global_norm(gradients)}
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, metrics

    def _of_shard_map(self, params: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
        data = tuple(self.data)

        def local(params: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
            value, gradients = mean(params, batch)
            return lax.pmean(value, data), jax.tree.map(lambda g: lax.pmean(g, data), gradients)

        return jax.shard_map(
            local, mesh=self.mesh, in_specs=(P(), P(None, data)), out_specs=P(), check_vma=False
        )(params, batch)  # fmt: skip

    def sharded(self, plan: Any, **options: Any) -> InterleavedStep:
        """The step on sharded states."""
        return strand_interleave(sharding=plan, passes=every_size(), **options)(self.step)


def mean(params: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
    """The mean loss and the mean gradients of the micro-batches."""

    def add(total: Tree, x: jax.Array) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, x)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.tree.map(lambda total: total / len(batch), lax.scan(add, zeros, batch)[0])


def every_size() -> tuple[Any, ...]:
    """The default passes, which here also change small loops."""
    small: tuple[type, ...] = (ParameterGathering, ParameterPrefetch, GradientReduction)
    return tuple(replace(p, least=1) if isinstance(p, small) else p for p in default_passes())


def trained(step: Callable[..., Any], state: Tree, case: Case, first: int = 0, last: int = 5) -> tuple[Tree, Tree]:
    """The state after steps `first` to `last`, and the metrics of the last one."""
    metrics = None
    for n in range(first, last):
        state, metrics = step(state, case.batch(n))
    return state, metrics


def difference(expected: Tree, found: Tree) -> float:
    """The largest difference of two trees, on the scale of the expected one."""
    pairs = list(zip(map(np.asarray, jax.tree.leaves(expected)), map(np.asarray, jax.tree.leaves(found)), strict=True))
    scale = max(float(np.max(np.abs(a))) for a, _ in pairs)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs) / scale
