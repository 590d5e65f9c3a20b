"""Programs that execute a collective matmul, or one side of it, many times over, to be timed as a whole.

    out = barrier(operands, out) -> operation -> out, `iterations` times in one compiled loop

The result of an iteration goes, with the operands, through an optimization barrier into the next one. So XLA can
neither hoist the operation out of the loop as invariant, nor merge or drop iterations, nor start one before the last is
done. No kernel is added for that: a barrier is none, the result's buffer (donated) is written in place, and operands
stay where they are. Calls enqueued one by one would measure Python and the launch of a program over all devices, 50 to
200 us each, which is more than many of these operations take. In the loop all iterations share one launch, and what an
iteration adds is the loop's counter, a kernel of 1 to 2 us, to all programs alike.

XLA reduces in place, and would copy an operand of an all-reduce that is still needed. So the all-reduce alone takes its
own result as the next operand. That grows by the number of devices each time, to infinity in the end; how long NCCL
takes does not depend on it.

Every array is one block per device, stacked along the first dimension: local [a, b] is [n a, b] sharded over the axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.benchmarks.collective_matmul.results import COLLECTIVE, GEMM
from dhelix.profiles.collective_matmul.sites import Form, Site
from dhelix.runtime import collective_matmul

AXIS = "tp"


@dataclass(frozen=True)
class Program:
    """What is timed.

    Attributes:
      name: GEMM, COLLECTIVE, or the key of a form.
      operands: names of `operand_shapes`.
      result: shape of the result on one device.
      call: from operands to the result, on one device inside `shard_map`.
      in_place: whether the only operand is what the iteration before gave, and at first the operand.
    """

    name: str
    operands: tuple[str, ...]
    result: tuple[int, int]
    call: Callable[..., jax.Array]
    in_place: bool = False


def operand_shapes(site: Site) -> dict[str, tuple[int, int]]:
    """Shapes on one device: x and w; what the GEMM alone reads (`gathered`) or the collective alone (`partial`)."""
    m, k, n = site.sizes
    if site.kind == "all_gather_matmul":
        return {"x": (m // site.axis_size, k), "w": (k, n), "gathered": (m, k)}
    return {"x": (m, k), "w": (k, n), "partial": (m, n)}


def programs(site: Site, forms: Sequence[Form]) -> list[Program]:
    """Both sides alone, then each form."""
    m, k, n = site.sizes
    part = m // site.axis_size
    collective, operand, of_collective, result = {
        "all_gather_matmul": (functools.partial(lax.all_gather, tiled=True), "x", (m, k), (m, n)),
        "matmul_reduce_scatter": (functools.partial(lax.psum_scatter, tiled=True), "partial", (part, n), (part, n)),
        "matmul_all_reduce": (lax.psum, "partial", (m, n), (m, n)),
    }[site.kind]
    whole = "gathered" if site.kind == "all_gather_matmul" else "x"
    operation, in_place = getattr(collective_matmul, site.kind), site.kind == "matmul_all_reduce"
    return [
        Program(GEMM, (whole, "w"), (m, n), jnp.dot),
        Program(COLLECTIVE, (operand,), of_collective, functools.partial(collective, axis_name=AXIS), in_place),
        *(
            Program(form.key, ("x", "w"), result, functools.partial(operation, axis_name=AXIS, form=form))
            for form in forms
        ),
    ]


def on_each[**A, R](mesh: Mesh, function: Callable[A, R]) -> Callable[A, R]:
    """`function` of blocks, on each device."""
    return jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)


def loop(program: Program, mesh: Mesh, iterations: int) -> Callable[..., jax.Array]:
    """Jitted: a buffer for the result (donated) and the operands to the result of the last iteration.

    What works in place has but the buffer.
    """

    def run(out: jax.Array, *operands: jax.Array) -> jax.Array:
        def body(_: jax.Array, out: jax.Array) -> jax.Array:
            *again, before = lax.optimization_barrier((*operands, out))
            return program.call(*(again or [before]))

        return lax.fori_loop(0, iterations, body, out)

    return jax.jit(on_each(mesh, run), donate_argnums=0)


def lowered(program: Program, site: Site, mesh: Mesh, iterations: int) -> jax.stages.Lowered:
    """`loop` for the shapes of a site."""
    shapes = operand_shapes(site)
    blocks = [program.result, *(() if program.in_place else (shapes[operand] for operand in program.operands))]
    return loop(program, mesh, iterations).lower(*(_block(mesh, shape, site.dtype) for shape in blocks))


def _block(mesh: Mesh, shape: tuple[int, int], dtype: str) -> jax.ShapeDtypeStruct:
    stacked = (shape[0] * mesh.size, shape[1])
    return jax.ShapeDtypeStruct(stacked, jnp.dtype(dtype), sharding=NamedSharding(mesh, P(AXIS)))


def operands(site: Site, mesh: Mesh) -> dict[str, jax.Array]:
    """Of `operand_shapes`, other ones on each device: normal numbers, as zeros draw less power and so run faster.

    w is scaled so that results have a deviation near 1, as activations have.
    """
    depth = site.contraction * (1 if site.kind == "all_gather_matmul" else site.axis_size)
    shapes = operand_shapes(site)

    def make() -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS)), len(shapes))
        return {
            name: (jax.random.normal(key, shape, jnp.float32) * (depth**-0.5 if name == "w" else 1)).astype(site.dtype)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    return jax.jit(on_each(mesh, make))()


def arguments(program: Program, site: Site, mesh: Mesh, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Of the first call of a loop. Where it works in place, the operand is gone afterwards."""
    if program.in_place:
        return [operands[program.operands[0]]]
    block = _block(mesh, program.result, site.dtype)
    out = jnp.zeros(block.shape, block.dtype, device=block.sharding)
    return [out, *(operands[operand] for operand in program.operands)]


def reference(site: Site, mesh: Mesh, x: jax.Array, w: jax.Array) -> jax.Array:
    """The collective matmul in float32, in as many steps as there are operations."""

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        if site.kind == "all_gather_matmul":
            x = lax.all_gather(x, AXIS, tiled=True)
        product = jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        if site.kind == "all_gather_matmul":
            return product
        if site.kind == "matmul_all_reduce":
            return lax.psum(product, AXIS)
        return lax.psum_scatter(product, AXIS, tiled=True)

    return jax.jit(on_each(mesh, plain))(x, w)


def tolerance(site: Site) -> float:
    """Of the largest result: each of n partial products may be rounded once, and their sum once more.

    bf16 on 4 devices: 5 x 2^-8, 0.02. A tile that is missing, or taken from another place, is off by about 1.
    """
    return (site.axis_size + 1) * float(jnp.finfo(site.dtype).eps) / 2


@jax.jit
def difference(expected: jax.Array, found: jax.Array) -> jax.Array:
    """The largest difference to the reference, by the reference's largest number. NaN where `found` has any."""
    return jnp.max(jnp.abs(found.astype(jnp.float32) - expected)) / jnp.max(jnp.abs(expected))
