"""The ring forms: `ppermute` sends chunks around a ring of devices. The next chunk is sent during the current matmul.

    all_gather_matmul, device 1 of 4         step     0          1          2          3
                                    multiply          x1         x0         x3         x2     -> rows of out
                                    receive           x0         x3         x2         -

    matmul_reduce_scatter, device 1 of 4     step     0          1          2          3
                                    multiply rows of  x0         x3         x2         x1
                                    receive           -          sum 3      sum 2      sum 1
                                    send on           sum 0      sum 3      sum 2      -      sum 1 is the result

Chunk x0 holds the rows of `x` that belong to device 0. Sum 0 is a partial sum of the same rows of the result.

The products and permutes of one step are independent of each other. An optimization barrier between steps makes the
next step wait for both. Without the barrier, XLA runs all permutes first, so that they overlap with nothing. XLA also
merges the matmuls of several chunks, because these share `w`.

The argument `directions` says how many rings there are. RING is one ring. BIDIRECTIONAL is two rings, each with half of
a chunk's rows, so that both directions of a link carry data. Sums are sent in the operands' type, as in NCCL. They are
added outside of the matmul: a matmul with an addend could not start before the addend arrives.

Legality: for reduce-scatter and all-reduce, the number of rows of `x` must be divisible by the axis size. Two rings
need at least two rows per device.
Cost: the GEMM runs in n pieces. All-gather copies each chunk's result to its rows. Reduce-scatter copies each chunk's
rows out of `x`, and adds its product to the sum that arrives. The copies exist because a library's GEMM kernel takes no
offset that is known only at run time.
Sources: the rings are from "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
DistFuse, section 3, discusses such rings on GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from dhelix.runtime.collective_matmul.products import (
    columns_of,
    joined,
    matmul,
    rows_axis,
    rows_of,
    unwritten,
    with_rows,
)

Directions = tuple[int, ...]
RING: Directions = (1,)
BIDIRECTIONAL: Directions = (1, -1)


@dataclass(frozen=True)
class _Lane:
    """One ring of devices. A chunk has `chunk` rows; the ring sends rows `start` to `start + rows - 1` of every chunk.

    `direction` is 1 if the ring sends to the next device of the axis, and -1 if it sends to the previous one.
    """

    axis_name: str
    direction: int
    chunk: int
    start: int
    rows: int

    def permute(self, piece: jax.Array) -> jax.Array:
        """Sends `piece` to the next device of the ring, and returns the piece of the previous device."""
        n = lax.axis_size(self.axis_name)
        return lax.ppermute(piece, self.axis_name, [(i, (i + self.direction) % n) for i in range(n)])

    def row(self, steps_back: int) -> jax.Array:
        """The index of the first row of this lane's part of a chunk, counted over the rows of all devices.

        The chunk belongs to the device that is `steps_back` places back in the ring.
        """
        n = lax.axis_size(self.axis_name)
        me = lax.axis_index(self.axis_name)
        return lax.rem(me + (-self.direction * steps_back) % n, jnp.int32(n)) * self.chunk + self.start


def _lanes(axis_name: str, chunk: int, directions: Directions) -> list[_Lane]:
    cuts = [chunk * i // len(directions) for i in range(len(directions) + 1)]
    return [
        _Lane(axis_name, direction, chunk, start, end - start)
        for direction, start, end in zip(directions, cuts[:-1], cuts[1:], strict=True)
    ]


def _send(lanes: Sequence[_Lane], pieces: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Sends the pieces of all lanes at the same time."""

    def permute(pieces: Sequence[jax.Array]) -> list[jax.Array]:
        return [lane.permute(piece) for lane, piece in zip(lanes, pieces, strict=True)]

    if len(lanes) == 1:
        return permute(pieces)
    # XLA has one collective in flight at a time. It runs a call with these attributes as one NCCL group.
    with set_xla_metadata(_collectives_group="", inlineable="false"):
        return jax.jit(permute)(pieces)


def _products(pieces: Sequence[jax.Array], w: jax.Array, transposed: bool) -> tuple[list[jax.Array], jax.Array]:
    """Multiplies the pieces by `w`, one after the other. Returns the products, and `w` for later uses.

    The barriers keep XLA from merging matmuls that share an operand. For a merged matmul, XLA would copy the other
    operands into one array.
    """
    products: list[jax.Array] = []
    for piece in pieces:
        product, w = lax.optimization_barrier((matmul(piece, w, transposed), w))
        products.append(product)
    return products, w


def all_gather_matmul(
    x: jax.Array, w: jax.Array, axis_name: str, directions: Directions, transposed: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Gathers `x [..., rows / n, k]` and multiplies it by `w`. Returns the product and the gathered `x`.

    XLA drops the gathered `x` if it has no users.
    """
    n, chunk = lax.axis_size(axis_name), x.shape[-2]
    lanes = _lanes(axis_name, chunk, directions)
    held = [rows_of(x, lane.start, lane.rows) for lane in lanes]
    gathered = unwritten(x, n * chunk)
    out = unwritten(x, n * chunk, columns_of(w, transposed))
    for step in range(n):
        arriving = _send(lanes, held) if step < n - 1 else []
        products, w = _products(held, w, transposed)
        held, arriving, products, w = lax.optimization_barrier((held, arriving, products, w))
        for lane, piece, product in zip(lanes, held, products, strict=True):
            gathered = with_rows(gathered, piece, lane.row(step))
            out = with_rows(out, product, lane.row(step))
        held = arriving
    return out, gathered


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    w: jax.Array,
    axis_name: str,
    directions: Directions,
    transposed: bool = False,
    beside: Sequence[jax.Array] = (),
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Concatenates `xs` to `[..., rows, k / n]`, multiplies by `w`, sums over the devices, and scatters the rows.

    Returns:
      This device's rows of the sum, `[..., rows / n, columns]`, and the arrays `beside`. XLA computes `beside` (such as
      the result of another collective) in the first step, which has no permute.
    """
    n = lax.axis_size(axis_name)
    lanes = _lanes(axis_name, xs[0].shape[-2] // n, directions)
    sums: Sequence[jax.Array] = []
    for step in range(n):
        arriving = _send(lanes, sums) if step else []
        pieces = [joined([rows_of(x, lane.row(step + 1), lane.rows) for x in xs], axis=-1) for lane in lanes]
        products, w = _products(pieces, w, transposed)
        arriving, products, xs, w, beside = lax.optimization_barrier((arriving, products, xs, w, beside))
        sums = [total + product for total, product in zip(arriving, products, strict=True)] if step else products
    return joined(sums, axis=rows_axis(xs[0])), beside


def matmul_all_reduce(x: jax.Array, w: jax.Array, axis_name: str, directions: Directions) -> jax.Array:
    """The sum over devices of `x [..., rows, k / n]` times `w`. Each device gets all rows, `[..., rows, columns]`.

    Runs `matmul_reduce_scatter`, and then an all-gather that overlaps with no matmul.
    """
    scattered, _ = matmul_reduce_scatter((x,), w, axis_name, directions)
    return lax.all_gather(scattered, axis_name, axis=rows_axis(scattered), tiled=True, to="invarying")
