"""One step against another: `strand_interleave(verify=True)`.

Two comparisons, each on copies of the arguments, so that donated ones survive:
1. The transformed step against the same step without passes. Passes do not reorder additions, so the outputs
   are bit-equal or, where XLA fused differently, within `TOLERANCE` of each leaf's largest magnitude.
2. With `microbatches=`: losses and gradients of the loop that `value_and_grad` built against those of the
   whole batch. Here the order of additions differs, and this is where a `reduce` that does not fit shows.

In a program that computes in less than float32, both tolerances are at least two units of its narrowest type. A step
that is not the same twice on the same arguments (atomic additions on GPUs: an embedding's gradient in bf16 was seen
to differ by a sixth of its largest element) may differ from the plain one by `NOISE` times what that differs from
itself by.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhelix.errors import DhelixError

TOLERANCE = 1e-6
LOOP_TOLERANCE = 1e-5
NOISE = 4.0
_NARROW = {"bf16": 2.0**-7, "f16": 2.0**-10, "f8": 2.0**-2, "f4": 0.5}


class VerificationError(DhelixError):
    """The step computes something else than the plain one."""


def copy_arguments(tree: Any) -> Any:
    """Copies of all arrays of `tree`, with the same shardings; other leaves as they are."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def tolerance(lowered: jax.stages.Lowered, base: float) -> float:
    """`base`, or two units of the narrowest floating-point type that the program computes in."""
    found = re.findall(r"[x<](bf16|f16|f8|f4)[A-Z0-9a-z]*>", lowered.as_text())
    return max([base, *(2 * _NARROW[name] for name in set(found))])


def compare(
    expected: Any,
    actual: Any,
    what: str,
    relative: float,
    advice: str,
    *,
    again: Any = None,
    one_scale: bool = False,
) -> None:
    """Raises VerificationError, naming the worst leaf, unless all leaves agree.

    Args:
      expected, actual: pytrees of the same structure.
      what: names the trees in the message.
      relative: largest difference, in units of the leaf's largest finite magnitude. Integers must be equal.
      advice: last sentence of the message.
      again: a second run of what gave `expected`, of which `NOISE` times the difference is allowed.
      one_scale: take the largest magnitude of all leaves for each. For gradients: one that is zero but for
        rounding, such as that of an attention key's bias, has no scale of its own.
    """
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    found = _all_differences(expected, actual)
    noise = _all_differences(expected, expected if again is None else again)
    largest = max((scale for _, scale in found), default=0.0)
    worst: tuple[float, str, str] | None = None
    for (path, want), (difference, scale), (random, _) in zip(leaves, found, noise, strict=True):
        scale = largest if one_scale else scale
        inexact = jnp.issubdtype(_numbers(want).dtype, jnp.inexact)
        allowed = max(relative * scale, NOISE * random) if inexact else 0.0
        excess = difference / allowed if allowed else (np.inf if difference else 0.0)
        if difference > allowed and (worst is None or excess > worst[0]):
            name = what + jax.tree_util.keystr(path)
            worst = excess, name, f"differs by {difference:.3g}, where {allowed:.3g} is allowed"
    if worst is not None:
        raise VerificationError(f"{worst[1]} {worst[2]}. {advice}")


def _all_differences(expected: Any, actual: Any) -> list[tuple[float, float]]:
    """For each leaf the largest difference and the largest magnitude of `expected`."""
    wanted, given = (list(map(_numbers, jax.tree.leaves(tree))) for tree in (expected, actual))
    return [(float(pair[0]), float(pair[1])) for pair in jax.device_get(_differences(wanted, given))]


def _numbers(x: Any) -> jax.Array:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else jnp.asarray(x)


@jax.jit
def _differences(wanted: list[jax.Array], given: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [_difference(want, got) for want, got in zip(wanted, given, strict=True)]


def _difference(want: jax.Array, got: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest difference, infinite where only one is NaN, and the largest finite magnitude of `want`."""
    if want.size == 0:
        return jnp.float32(0), jnp.float32(0)
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return jnp.max(want != got).astype(jnp.float32), jnp.float32(0)
    wide = jnp.promote_types(want.dtype, jnp.float32)
    want, got = want.astype(wide), got.astype(wide)
    same = (want == got) | (jnp.isnan(want) & jnp.isnan(got))
    difference = jnp.where(same, 0, jnp.abs(want - got))
    magnitude = jnp.where(jnp.isfinite(want), jnp.abs(want), 0)
    return jnp.max(jnp.where(jnp.isnan(difference), jnp.inf, difference)), jnp.max(magnitude)
