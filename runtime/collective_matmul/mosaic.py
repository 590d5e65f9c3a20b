"""The form "mosaic": calls the Mosaic-GPU kernels of `kernels/`, which multiply matrices without batch dimensions.

In an operand or result of a kernel, all rows of one device are contiguous, even if they belong to several batch
elements. So rows are transposed before or after the kernel:

    x [b, rows / n, k] on each device = [b * rows / n, k]  -gather->  [n, b, rows / n, k]  -transpose->  [b, rows, k]

With one batch element, the transpose does nothing. With more batch elements, it costs a copy of the result (all-gather)
or of the operand (reduce-scatter). All-reduce needs no transpose, because every device has all rows.

Kernels are imported on first use, because Mosaic GPU does not exist on every platform.

A kernel holds its streaming multiprocessors while it waits for its peers. An NCCL collective in flight also needs
multiprocessors on all devices. A kernel and a collective can then wait for each other forever, so callers order them by
data dependencies.
"""

import importlib
import math
from typing import Any

import jax
from jax import lax

from dhelix.profiles.collective_matmul.sites import Site, Tiles
from dhelix.runtime.collective_matmul.products import columns_of

_KERNELS = "dhelix.runtime.collective_matmul.kernels"


def refusal(site: Site, tiles: Tiles | None) -> str | None:
    """Returns why no kernel can run at `site` with these tiles; None if a kernel can."""
    try:
        supported = _kernel(site.kind, "supported")
    except ImportError as error:
        return f"Mosaic GPU cannot be imported: {error}"
    return supported(site, tiles)


def all_gather_matmul(
    x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None, transposed: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Gathers `x [..., rows / n, k]` and multiplies it by `w`. Returns the product and the gathered `x`."""
    kernel = _kernel("all_gather_matmul", "all_gather_matmul_kernel")
    results = kernel(_folded(x), w.T if transposed else w, axis_name, tiles)
    out, gathered = (_from_devices(y, x, lax.axis_size(axis_name)) for y in results)
    return out, gathered


def matmul_reduce_scatter(
    x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None, transposed: bool = False
) -> jax.Array:
    """This device's rows, `[..., rows / n, columns]`, of the sum over devices of `x [..., rows, k / n]` times `w`."""
    kernel = _kernel("matmul_reduce_scatter", "matmul_reduce_scatter_kernel")
    n = lax.axis_size(axis_name)
    out = kernel(_by_device(x, n), w.T if transposed else w, axis_name, tiles)
    return out.reshape(*x.shape[:-2], x.shape[-2] // n, columns_of(w, transposed))


def matmul_all_reduce(x: jax.Array, w: jax.Array, axis_name: str, tiles: Tiles | None) -> jax.Array:
    """The sum over devices of `x [..., rows, k / n]` times `w`. Each device gets all rows, `[..., rows, columns]`."""
    out = _kernel("matmul_all_reduce", "matmul_all_reduce_kernel")(_folded(x), w, axis_name, tiles)
    return out.reshape(*x.shape[:-1], w.shape[1])


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{_KERNELS}.{module}"), name)


def _folded(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _by_device(x: jax.Array, n: int) -> jax.Array:
    """Reshapes `x [..., rows, k]` to `[all rows, k]`, ordered by device: first device 0's rows of the whole batch."""
    batch = math.prod(x.shape[:-2])
    return _folded(x.reshape(batch, n, -1, x.shape[-1]).swapaxes(0, 1))


def _from_devices(y: jax.Array, x: jax.Array, n: int) -> jax.Array:
    """Undoes the order of `_by_device` in `y`, a result that was computed from the gathered `x`.

    `x` is `[..., rows / n, k]` on each of `n` devices. The returned array is `[..., rows, columns]`.
    """
    batch, rows, columns = math.prod(x.shape[:-2]), x.shape[-2], y.shape[-1]
    return y.reshape(n, batch, rows, columns).swapaxes(0, 1).reshape(*x.shape[:-2], n * rows, columns)
