"""Programs for timing: compiled loops that repeat a collective matmul, its GEMM alone, or its collective alone.

    out = barrier(operands, out) -> operation -> out, `iterations` times in one compiled loop

An iteration's result and the operands go through an optimization barrier into the next iteration. So XLA cannot hoist
the operation out of the loop, merge or drop iterations, or start an iteration before the previous one is done. The
barrier adds no kernel: the result's donated buffer is written in place, and operands are not copied.

The time of a single call would include Python, and the launch of a program on all devices. Both can take longer than
the operation. In the loop, all iterations share one launch. The loop's counter adds the same short kernel to every
iteration of every program.

XLA reduces in place, so it would copy an all-reduce's operand that is still needed. The all-reduce alone therefore
takes its own result as the next operand. Each iteration multiplies the values by the number of devices, in the end to
infinity. NCCL's time does not depend on the values.

Every array has one block for each device, stacked along the first dimension. With blocks [a, b] on n devices, the array
is [n a, b], sharded over the axis.
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
    """A timed operation.

    Attributes:
      name: GEMM, COLLECTIVE, or the key of a form.
      operands: names in `operand_shapes`.
      result: shape of the result on one device.
      call: computes the result from the operands, on one device inside `shard_map`.
      in_place: whether each iteration's only operand is the previous result. The first iteration takes the operand.
    """

    name: str
    operands: tuple[str, ...]
    result: tuple[int, int]
    call: Callable[..., jax.Array]
    in_place: bool = False


def operand_shapes(site: Site) -> dict[str, tuple[int, int]]:
    """Shapes on one device: x, w, and the operand of a GEMM alone (`gathered`) or of a collective alone (`partial`)."""
    m, k, n = site.sizes
    if site.kind == "all_gather_matmul":
        return {"x": (m // site.axis_size, k), "w": (k, n), "gathered": (m, k)}
    return {"x": (m, k), "w": (k, n), "partial": (m, n)}


def programs(site: Site, forms: Sequence[Form]) -> list[Program]:
    """The programs of a site: the GEMM alone, the collective alone, then each form."""
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
    """A function that runs `function` on each device's block."""
    return jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)


def loop(program: Program, mesh: Mesh, iterations: int) -> Callable[..., jax.Array]:
    """A jitted function that runs `program` repeatedly and returns the last result.

    Its arguments are the result's donated buffer and the operands. If the program works in place, the only argument is
    the buffer.
    """

    def run(out: jax.Array, *operands: jax.Array) -> jax.Array:
        def body(_: jax.Array, out: jax.Array) -> jax.Array:
            *again, before = lax.optimization_barrier((*operands, out))
            return program.call(*(again or [before]))

        return lax.fori_loop(0, iterations, body, out)

    return jax.jit(on_each(mesh, run), donate_argnums=0)


def lowered(program: Program, site: Site, mesh: Mesh, iterations: int) -> jax.stages.Lowered:
    """`loop`, lowered for the shapes of a site."""
    shapes = operand_shapes(site)
    blocks = [program.result, *(() if program.in_place else (shapes[operand] for operand in program.operands))]
    return loop(program, mesh, iterations).lower(*(_block(mesh, shape, site.dtype) for shape in blocks))


def _block(mesh: Mesh, shape: tuple[int, int], dtype: str) -> jax.ShapeDtypeStruct:
    stacked = (shape[0] * mesh.size, shape[1])
    return jax.ShapeDtypeStruct(stacked, jnp.dtype(dtype), sharding=NamedSharding(mesh, P(AXIS)))


def operands(site: Site, mesh: Mesh) -> dict[str, jax.Array]:
    """Makes the operands of `operand_shapes`: normally distributed, because zeros draw less power and run faster.

    The numbers differ between devices. w is scaled so that results have a standard deviation near 1, like activations.
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
    """The arguments of a loop's first call. If the program works in place, the call donates the operand."""
    if program.in_place:
        return [operands[program.operands[0]]]
    block = _block(mesh, program.result, site.dtype)
    out = jnp.zeros(block.shape, block.dtype, device=block.sharding)
    return [out, *(operands[operand] for operand in program.operands)]


def reference(site: Site, mesh: Mesh, x: jax.Array, w: jax.Array) -> jax.Array:
    """The collective matmul in float32, as a separate product and collective."""

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
    """Allowed error as a fraction of the largest result: n partial products and their sum are each rounded once.

    For bf16 on 4 devices it is 5 x 2^-8, about 0.02. A missing or misplaced tile gives an error of about 1.
    """
    return (site.axis_size + 1) * float(jnp.finfo(site.dtype).eps) / 2


@jax.jit
def difference(expected: jax.Array, found: jax.Array) -> jax.Array:
    """The largest difference from the reference, divided by the reference's largest number. NaN if `found` has NaN."""
    return jnp.max(jnp.abs(found.astype(jnp.float32) - expected)) / jnp.max(jnp.abs(expected))
