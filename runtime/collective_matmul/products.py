"""Products on one device, and access to rows, for collective matmuls. Functions take any number of batch dimensions.

Arrays may be sharded over explicit mesh axes, which are not manual in the surrounding `shard_map`. Typically, such axes
shard batch dimensions.

Products have the operands' type, and XLA accumulates them in float32. If a product were float32 and were cast
afterwards, XLA would write the float32 product to memory and cast it in a separate kernel.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def matmul(x: jax.Array, w: jax.Array, transposed: bool = False) -> jax.Array:
    """`x [..., k]` times `w [k, columns]`, or times the transpose of `w [columns, k]`."""
    return lax.dot_general(x, w, (((x.ndim - 1,), (1 if transposed else 0,)), ((), ())))


def row_product(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
    """The transpose of `x [..., rows, k]` times `y [..., rows, columns]`, summed over the batch.

    This is the gradient of `w [k, columns]`.
    """
    summed = tuple(range(x.ndim - 1))
    return lax.dot_general(x, y, ((summed, summed), ((), ())), out_sharding=_explicit_sharding(w))


def rows_axis(x: jax.Array) -> int:
    return x.ndim - 2


def rows_of(x: jax.Array, start: jax.Array | int, rows: int) -> jax.Array:
    """`rows` rows of `x [..., all rows, k]`, beginning with row `start`."""
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + rows, axis=rows_axis(x))
    return lax.dynamic_slice_in_dim(x, start, rows, axis=rows_axis(x))


def with_rows(x: jax.Array, piece: jax.Array, start: jax.Array | int) -> jax.Array:
    """`x [..., all rows, k]` with `piece [..., rows, k]` written from row `start` on."""
    return lax.dynamic_update_slice_in_dim(x, piece, start, axis=rows_axis(x))


def unwritten(like: jax.Array, rows: int, columns: int | None = None) -> jax.Array:
    """An uninitialized array `[..., rows, columns]` with the batch dimensions and the type of `like`.

    The caller must write every element.
    """
    shape = (*like.shape[:-2], rows, like.shape[-1] if columns is None else columns)
    sharding = _explicit_sharding(like)
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: like.ndim - 2]))
    return lax.empty(shape, like.dtype, out_sharding=sharding)


def columns_of(w: jax.Array, transposed: bool) -> int:
    """Number of columns of a product with `w [k, columns]`, or with `w [columns, k]` if `transposed`."""
    return w.shape[0] if transposed else w.shape[1]


def joined(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    """Concatenates arrays along `axis`; a single array is not copied."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=axis)


def _explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding in the type of `x`; None if no mesh axis is explicit."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None
