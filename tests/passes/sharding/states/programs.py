"""Small steps whose states are sharded: programs before and after the passes, and what these programs contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import PassReport
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.constraints import is_sharding_constraint, stated
from dhelix.passes.sharding.states.state_axes import SplitAxes
from dhelix.passes.sharding.states.state_sharding import StateSharding
from dhelix.runtime.compiler import lowering

LAYERS, WIDTH = 4, 16

type Step = Callable[..., Any]


def mesh(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def placed(on: Mesh, spec: P, *size: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """An array of small numbers."""
    values = np.random.default_rng(seed).standard_normal(size) / 4
    return jax.device_put(jnp.asarray(values, dtype), NamedSharding(on, spec))


def stack(x: jax.Array, w: jax.Array) -> jax.Array:
    """The loss of stacked layers."""
    return jnp.sum(jnp.sin(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]))


def momentum(w: jax.Array, m: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    m = 0.9 * m + 0.1 * gradient
    return w - 0.5 * m, m


def state_sharding(data: Sequence[str] = ("dp",), **axes: Sequence[str]) -> StateSharding:
    """The pass of zero1; `axes` says otherwise."""
    return StateSharding(SplitAxes(tuple(data), **{"optimizer": tuple(data), **{k: tuple(v) for k, v in axes.items()}}))


def changed(lowered: jax.stages.Lowered, *passes: Any) -> tuple[jax.stages.Lowered, PassReport]:
    """The program after passes, and the report of the last one."""
    new, report = PassManager(passes, strict=True).run(Stage.LOWERED, lowering.hlo_bytes(lowered))
    return (lowered if new is None else lowering.with_hlo(lowered, new)), report.passes[-1]


def module(lowered: jax.stages.Lowered) -> HloModule:
    return HloModule.from_bytes(lowering.hlo_bytes(lowered))


def constraints(lowered: jax.stages.Lowered) -> Counter[tuple[Any, ...]]:
    """The sharding constraints of the entry: for each dimension, the axes."""
    found = [stated(i) for i in module(lowered).entry.instructions if is_sharding_constraint(i)]
    return Counter(tuple(split.over) for split in found if split is not None)


def instructions(lowered: jax.stages.Lowered, opcode: str) -> list[Instruction]:
    """All instructions of one kind, in the order of computations."""
    return [i for c in module(lowered).computations for i in c.instructions if i.opcode == opcode]


def sizes(lowered: jax.stages.Lowered, opcode: str) -> list[list[int]]:
    """The sizes of the results of all instructions of one kind, in order of size."""
    return sorted(list(i.shape.dimensions) for i in instructions(lowered, opcode))


def partitioned(lowered: jax.stages.Lowered) -> HloModule:
    """The program as the partitioner and all other passes of XLA leave it."""
    executable: Any = lowered.compile().runtime_executable()
    (compiled,) = executable.hlo_modules()
    return HloModule.from_bytes(compiled.as_serialized_hlo_module_proto())


def same(expected: Any, found: Any, tolerance: float = 0.0) -> None:
    """Compares results, on the scale of each array."""
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        scale = float(np.max(np.abs(np.asarray(a, np.float64))))
        np.testing.assert_allclose(np.asarray(b, np.float64), np.asarray(a, np.float64), rtol=0, atol=tolerance * scale)
