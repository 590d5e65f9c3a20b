"""The form "hybrid": rows are cut into a few chunks. A chunk's NCCL collective overlaps with another chunk's matmul.

    all_gather_matmul       gather c0 | gather c1   | gather c2   | gather c3   |
                                      | multiply c0 | multiply c1 | multiply c2 | multiply c3

    matmul_reduce_scatter   multiply c0 | multiply c1 | multiply c2 | multiply c3 |
    matmul_all_reduce                   | reduce c0   | reduce c1   | reduce c2   | reduce c3

For all-gather and reduce-scatter, a chunk is a part of every device's rows. So the rows of a chunk are not contiguous
in the array of all rows:

    rows of  device 0: c0 c1 c2 c3   device 1: c0 c1 c2 c3        c0 gathered: [device 0's c0, device 1's c0]

Optimization barriers between steps keep the order. They also keep XLA from combining the collectives again, and from
merging the matmuls, which share `w`.

Legality: the number of chunks must divide the rows of a device. For all-reduce, it must divide all rows.
Cost: the first chunk's gather, or the last chunk's reduction, is exposed. The GEMM becomes `chunks` smaller GEMMs.
All-gather copies each chunk's result to its rows. Reduce-scatter copies each chunk's rows out of `x`. (DistFuse,
section 3, uses chunks if tiles cannot be sent one by one.)
"""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from dhelix.runtime.collective_matmul.products import columns_of, joined, matmul, rows_axis, rows_of, unwritten


def all_gather_matmul(
    x: jax.Array, w: jax.Array, axis_name: str, chunks: int, transposed: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Gathers `x [..., rows / n, k]` and multiplies it by `w`. Returns the product and the gathered `x`.

    XLA drops the gathered `x` if it has no users.
    """
    n, rows = lax.axis_size(axis_name), x.shape[-2] // chunks

    def gather(x: jax.Array, chunk: int) -> jax.Array:
        return lax.all_gather(rows_of(x, chunk * rows, rows), axis_name, axis=rows_axis(x), tiled=True)

    gathered = _by_device(unwritten(x, n * x.shape[-2]), n, chunks)
    out = _by_device(unwritten(x, n * x.shape[-2], columns_of(w, transposed)), n, chunks)
    held = gather(x, 0)
    for chunk in range(chunks):
        product = matmul(held, w, transposed)
        arriving = held
        if chunk < chunks - 1:
            arriving = gather(x, chunk + 1)
            held, arriving, product, x, w = lax.optimization_barrier((held, arriving, product, x, w))
        out = _with_chunk(out, product, chunk)
        gathered = _with_chunk(gathered, held, chunk)
        held = arriving
    return _in_rows(out), _in_rows(gathered)


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    w: jax.Array,
    axis_name: str,
    chunks: int,
    transposed: bool = False,
    beside: Sequence[jax.Array] = (),
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Concatenates `xs` to `[..., rows, k / n]`, multiplies by `w`, sums over the devices, and scatters the rows.

    Returns:
      This device's rows of the sum, `[..., rows / n, columns]`, and the arrays `beside`. XLA computes `beside` (such as
      the result of another collective) during the first chunk's matmul, which overlaps with no reduction.
    """
    n = lax.axis_size(axis_name)

    def multiply(xs: Sequence[jax.Array], w: jax.Array, chunk: int) -> jax.Array:
        pieces = [_chunk_of(_by_device(x, n, chunks), chunk) for x in xs]
        return matmul(joined(pieces, axis=-1), w, transposed)

    def reduce(product: jax.Array) -> jax.Array:
        return lax.psum_scatter(product, axis_name, scatter_dimension=rows_axis(product), tiled=True)

    return _reduced_chunks(xs, w, chunks, multiply, reduce, beside)


def matmul_all_reduce(x: jax.Array, w: jax.Array, axis_name: str, chunks: int) -> jax.Array:
    """The sum over devices of `x [..., rows, k / n]` times `w`. Each device gets all rows, `[..., rows, columns]`."""
    rows = x.shape[-2] // chunks

    def multiply(xs: Sequence[jax.Array], w: jax.Array, chunk: int) -> jax.Array:
        return matmul(rows_of(xs[0], chunk * rows, rows), w)

    out, _ = _reduced_chunks((x,), w, chunks, multiply, lambda product: lax.psum(product, axis_name))
    return out


def _reduced_chunks(
    xs: Sequence[jax.Array],
    w: jax.Array,
    chunks: int,
    multiply: Callable[[Sequence[jax.Array], jax.Array, int], jax.Array],
    reduce: Callable[[jax.Array], jax.Array],
    beside: Sequence[jax.Array] = (),
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Multiplies chunk by chunk, and reduces each chunk while the next one is multiplied.

    Returns the concatenated results, and `beside` as in `matmul_reduce_scatter`.
    """
    results: list[jax.Array] = []
    for chunk in range(chunks):
        product = multiply(xs, w, chunk)
        product, results, xs, w, beside = lax.optimization_barrier((product, results, xs, w, beside))
        results = [*results, reduce(product)]
    return joined(results, axis=rows_axis(results[0])), beside


def _by_device(x: jax.Array, devices: int, chunks: int) -> jax.Array:
    """Reshapes `x [..., rows, k]` to `[..., devices, chunks, rows of a chunk, k]`."""
    return x.reshape(*x.shape[:-2], devices, chunks, -1, x.shape[-1])


def _chunk_of(x: jax.Array, chunk: int) -> jax.Array:
    """One chunk of `x [..., devices, chunks, rows of a chunk, k]`, reshaped to `[..., rows, k]`."""
    piece = lax.index_in_dim(x, chunk, axis=x.ndim - 3, keepdims=False)
    return piece.reshape(*piece.shape[:-3], -1, piece.shape[-1])


def _with_chunk(x: jax.Array, piece: jax.Array, chunk: int) -> jax.Array:
    """The inverse of `_chunk_of`: `x` with this chunk replaced by `piece`."""
    piece = piece.reshape(*x.shape[:-3], 1, *x.shape[-2:])
    return lax.dynamic_update_slice_in_dim(x, piece, chunk, axis=x.ndim - 3)


def _in_rows(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])
