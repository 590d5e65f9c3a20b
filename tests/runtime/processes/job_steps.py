"""Helpers for a job of two processes: joining it, and steps over the devices of both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import HloModule
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import InterleavedStep, strand_interleave

type Batch = dict[str, jax.Array]
type Told = tuple[str, float, float]


@dataclass(frozen=True)
class RefusesIn:
    """Strand duplication that refuses in the given processes."""

    name = "refuses"
    stage = Stage.LOWERED

    processes: tuple[int, ...]

    def run(self, module: HloModule, context: PassContext) -> bool:
        if jax.process_index() in self.processes:
            raise PassRefusal("this process has no room")
        return StrandDuplication().run(module, context)


def join(process: int, port: str, **options: Any) -> None:
    """Joins a job of two processes as number `process`."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, **options)


def arguments(rows: int = 16) -> tuple[jax.Array, Batch]:
    """Weights and a batch over the devices of both processes."""
    mesh = jax.make_mesh((len(jax.devices()),), ("dp",), axis_types=(AxisType.Auto,))
    random = np.random.RandomState(0)

    def put(value: np.ndarray, *spec: str) -> jax.Array:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    w = put(random.standard_normal((3, 8, 8)).astype(np.float32) / 3)
    return w, {name: put(random.standard_normal((rows, 8)).astype(np.float32), "dp") for name in "xy"}


def squared_error(w: jax.Array, batch: Batch) -> jax.Array:
    """A scan over layers gives a forward and a backward loop."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return jnp.mean((jax.lax.scan(layer, batch["x"], w)[0] - batch["y"]) ** 2)


def unchanged(x: jax.Array) -> jax.Array:
    return x


def decorated(
    name: str = "step", last: Callable[[jax.Array], jax.Array] = unchanged, **options: Any
) -> InterleavedStep:
    """A train step of two micro-batches.

    Args:
      name: name of the step.
      last: applied to the first array of the batch at the end of the step.
      options: options of `strand_interleave`.
    """

    def step(w: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        loss, gradients = value_and_grad(squared_error)(w, batch)
        return w - 0.1 * gradients, loss, last(batch["x"])

    step.__name__ = name
    given: Any = {"microbatches": 2, **options}
    return strand_interleave(**given)(step)


def two_collectives(gather_first: bool) -> Callable[[jax.Array], jax.Array]:
    """A loop with both kinds of collectives, in one order or the other, over a mesh of two devices."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, "x", tiled=True).sum() + x

    def rotate(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "x", [(0, 1), (1, 0)])

    def body(_: int, x: jax.Array) -> jax.Array:
        return rotate(gather(x)) if gather_first else gather(rotate(x))

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, body, x)

    return jax.shard_map(loop, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)


@contextlib.contextmanager
def told(found: list[Told]) -> Iterator[None]:
    """Appends the error that stops this process in the block, and the times of entry and of exit, to `found`."""
    came = time.time()
    try:
        yield
        found.append(("nothing", came, time.time()))
    except DhelixError as error:
        found.append((f"{type(error).__name__}: {error}", came, time.time()))
