"""Implements `strand_interleave(verify=True)`: compares the results of two steps.

There are two comparisons. Both use copies of the arguments, so donated arguments stay valid:
1. `check_passes` compares the transformed step with the same step without passes. Results may differ by `TOLERANCE` of
   each leaf's largest magnitude. They differ if XLA chose other fusions, or if a pass changed the order of additions
   (`ReplicaSums`, for example). Otherwise they are bit-equal.
2. With `microbatches=`, `check_microbatches` compares the loop over micro-batches of `value_and_grad` with a single
   gradient computation over the whole batch. It compares losses, gradients and auxiliary outputs. The loop adds in
   another order, so they may differ by `LOOP_TOLERANCE`. This comparison detects a `reduce` that does not fit the loss.

If the program computes in less than float32, both tolerances are at least two units of its narrowest floating-point
type. A unit is the value of the last bit of 1.0.

Some leaves consist only of rounding errors, called noise here. For example, the gradient of an attention key's bias is
zero in exact arithmetic, and Adam divides its noise by the noise's own size. Also, some steps give different results
each time, because GPUs add atomically. So the plain step runs three more times: once on the same arguments, and twice
on arguments whose last bits are changed. The noise of a leaf is its largest change in these runs. A leaf may differ by
`NOISE` times its noise.

While a comparison runs, memory holds the results of the plain step and of one other run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhelix.errors import DhelixError
from dhelix.runtime.step.microbatches.combining import collections

TOLERANCE = 1e-6
LOOP_TOLERANCE = 1e-5
NOISE = 4.0
_NARROW = {"bf16": 2.0**-7, "f16": 2.0**-10, "f8": 2.0**-2, "f4": 0.5}
_RANDOM = re.compile(r"threefry|rng_bit_generator|stablehlo\.rng\b")


class VerificationError(DhelixError):
    """The step does not compute the same results as the plain step."""


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison of two pytrees that agree within the tolerance.

    Attributes:
      leaves: number of leaves compared.
      largest: the largest difference in a leaf that is not noise, relative to the leaf's largest magnitude.
      where: the name of the leaf with this difference.
      noise: names of leaves that differ by more than `allowed`, but by no more than the plain step's noise permits.
      allowed: the relative difference that is allowed in a leaf that is not noise.
    """

    leaves: int
    largest: float
    where: str
    noise: tuple[str, ...]
    allowed: float

    def __str__(self) -> str:
        where = f" in {self.where}" if self.largest else ""
        noise = f"; {len(self.noise)} are rounding noise, such as {self.noise[0]}" if self.noise else ""
        return f"the largest difference is {self.largest:.1e}{where} (allowed: {self.allowed:.1e}){noise}"


def check_passes(
    plain: Callable[..., Any],
    changed: Callable[..., Any],
    lowered: jax.stages.Lowered,
    args: Any,
    kwargs: Any,
    passes: str,
) -> Agreement:
    """Raises VerificationError unless both steps return the same results.

    Args:
      plain, changed: the steps. They are called with `*args, **kwargs`.
      lowered: the plain step, lowered.
      args, kwargs: the step's arguments.
      passes: names of the passes that changed the program, for the error message.
    """
    expected, noise = _result_and_noise(plain, lowered, args, kwargs)
    advice = (
        f"A pass changed what the step computes ({passes}): report this; meanwhile disable passes by name with "
        "disable=, or set DHELIX=off"
    )
    given, keywords = copy_arguments((args, kwargs))
    actual = changed(*given, **keywords)
    return compare(expected, actual, "output", tolerance(lowered, TOLERANCE), advice, noise=noise)


def check_microbatches(
    whole: Any, split: Any, lowered: jax.stages.Lowered, args: Any, kwargs: Any, microbatches: int, reduce: str
) -> Agreement | None:
    """Raises VerificationError unless micro-batches give the same losses and gradients as the whole batch.

    Args:
      whole: function of `*args, **kwargs` that returns (value, gradients) of each call of `value_and_grad` in the step.
        Each call gets the whole batch.
      split: the same function, but each call splits its batch into micro-batches.
      lowered: the plain step, lowered.
      args, kwargs: the step's arguments.
      microbatches, reduce: the step's options.

    Returns:
      The result of the comparison. Calls of `value_and_grad` in functions that JAX traces separately (jit, scan,
      shard_map) are not compared. None if there are no other calls.
    """
    relative = tolerance(lowered, LOOP_TOLERANCE)
    expected, noise = _result_and_noise(whole, lowered, args, kwargs)
    actual = split(*args, **kwargs)
    calls = [list(map(_parts, call)) for call in zip(expected, actual, noise, strict=True)]
    losses, given_losses = ([call[tree]["loss"] for call in calls] for tree in (0, 1))
    advice = _why_microbatches_differ(losses, given_losses, lowered, microbatches, reduce, relative)
    found = []
    for what in ("loss", "gradient", "auxiliary output"):
        if what == "auxiliary output":  # here, losses and gradients agree
            advice = _why_auxiliary_outputs_differ(lowered, microbatches)
        for wanted, given, random in calls:
            scale = {"noise": random[what], "one_scale": what == "gradient"}
            found.append(compare(wanted[what], given[what], what, relative, advice, **scale))
    if not found:
        return None
    worst = max(found, key=lambda one: one.largest)
    noise = tuple(name for one in found for name in one.noise)
    return replace(worst, leaves=sum(one.leaves for one in found), noise=noise)


def _parts(result: Any) -> dict[str, Any]:
    """Splits a result of `value_and_grad` into loss, gradient and auxiliary output.

    If there is an auxiliary output, the result's value is a pair whose first part is the loss.
    """
    value, gradients = result
    loss, aux = value if isinstance(value, tuple | list) else (value, ())
    return {"loss": loss, "gradient": gradients, "auxiliary output": aux}


def _why_auxiliary_outputs_differ(lowered: jax.stages.Lowered, microbatches: int) -> str:
    """The advice for the case that losses and gradients agree, but an auxiliary output differs."""
    start = (
        f"Losses and gradients of {microbatches} micro-batches agree with the whole batch, but this output does not: "
    )
    if _RANDOM.search(lowered.as_text()):
        return start + "it may draw random numbers, such as dropout, which must be off for verify="
    return start + (
        "integers add up, and other numbers combine like the loss (reduce=). Return a count as an integer, and "
        "anything that is neither a count nor a mean as an array with one value per row"
    )


def _why_microbatches_differ(
    whole: Any, split: Any, lowered: jax.stages.Lowered, microbatches: int, reduce: str, relative: float
) -> str:
    """The advice for the case that losses or gradients differ.

    It depends on the factor between the losses, and on whether the step draws random numbers.
    """
    start = f"{microbatches} micro-batches do not combine to the whole batch: "
    for factor, right in ((float(microbatches), "sum"), (1 / microbatches, "mean")):
        scaled = [_scaled(value, factor) for value in split]
        if reduce != right and _agree(whole, scaled, relative):
            kind = "the sum over the rows" if right == "sum" else "a mean over the rows"
            return start + f'the loss is {kind}, so use reduce="{right}"'
    if _RANDOM.search(lowered.as_text()):
        return start + "the loss draws random numbers, such as dropout, which must be off for verify="
    if reduce == "weighted":
        return start + "weights= must return the number by which the loss of a micro-batch is divided"
    return start + (
        'if micro-batches have different weights (padding masks), use reduce="weighted"; a loss over the whole batch '
        "at once (batch norm, contrastive losses, balance of experts) changes with micro-batches; if the loss captures "
        "its batch, or another argument than the batch was split, pass the batch and name it (batch_argnums=)"
    )


def _scaled(value: Any, factor: float) -> Any:
    return jax.tree.map(lambda x: x * factor if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x, value)


def _agree(expected: Any, actual: Any, relative: float) -> bool:
    try:
        compare(expected, actual, "", relative, "")
    except VerificationError:
        return False
    return True


def copy_arguments(tree: Any) -> Any:
    """Returns `tree` with a copy of each array in the same sharding. Other leaves are not copied."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def _result_and_noise(
    function: Callable[..., Any], lowered: jax.stages.Lowered, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Returns the result of a function, and the noise of each leaf of the result (see the module)."""
    expected = function(*copy_arguments(args), **copy_arguments(kwargs))
    noise = [0.0] * len(jax.tree.leaves(expected))
    unit = _narrowest_unit(lowered) / NOISE
    for sign in (0, 1, -1):
        given, keywords = _nudged((args, kwargs), sign, unit)
        differences = _all_differences(expected, function(*given, **keywords))
        noise = [max(most, here) for most, (here, _) in zip(noise, differences, strict=True)]
    return expected, jax.tree.unflatten(jax.tree.structure(expected), noise)


def _nudged(tree: Any, sign: int, unit: float) -> Any:
    """Returns a copy of `tree` with changed last bits. In turn, floating-point leaves grow and shrink.

    A leaf changes by its type's last bit or by the fraction `unit`, whichever is larger. If `sign` is 0, nothing
    changes. Signs 1 and -1 change each leaf in opposite directions.
    """
    leaves, treedef = jax.tree.flatten(copy_arguments(tree))
    for n, leaf in enumerate(leaves if sign else ()):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            step = sign * (-1) ** n * max(float(jnp.finfo(leaf.dtype).eps), unit)
            nudged = (leaf * jnp.asarray(1 + step, leaf.dtype)).astype(leaf.dtype)
            leaves[n] = jax.device_put(nudged, leaf.sharding) if leaf.committed else nudged
    return treedef.unflatten(leaves)


def tolerance(lowered: jax.stages.Lowered, base: float) -> float:
    """Returns the larger of `base` and two units of the narrowest floating-point type in the program."""
    return max(base, 2 * _narrowest_unit(lowered))


def _narrowest_unit(lowered: jax.stages.Lowered) -> float:
    """The value of the last bit of 1.0 in the narrowest floating-point type of a program.

    It is 0 if all types are wider than 16 bits.
    """
    found = re.findall(r"[x<](bf16|f16|f8|f4)[A-Z0-9a-z]*>", lowered.as_text())
    return max((_NARROW[name] for name in set(found)), default=0.0)


def compare(
    expected: Any,
    actual: Any,
    what: str,
    relative: float,
    advice: str,
    *,
    noise: Any = None,
    one_scale: bool = False,
) -> Agreement:
    """Raises VerificationError unless all leaves of two pytrees agree. The message names the worst leaf.

    Args:
      expected, actual: pytrees of the same structure.
      what: name of the trees in the message.
      relative: allowed difference, relative to the leaf's largest finite magnitude. Integers must be equal.
      advice: last sentence of the message.
      noise: noise of each leaf of `expected`. A difference of `NOISE` times the noise is allowed. None: no noise.
      one_scale: whether the allowed difference of each leaf is relative to the largest magnitude of all leaves. This is
        for gradients. A gradient that is zero except for rounding, such as the gradient of an attention key's bias,
        has no scale of its own. Flax's fp8 histories are also among the gradients and may be much larger, so each
        Flax collection has its own scale.
    """
    names = [what + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    found = _all_differences(expected, actual)
    randoms = [0.0] * len(names) if noise is None else jax.tree.leaves(noise)
    scales = [scale for _, scale in found]
    if one_scale:
        kinds = collections(expected)
        largest_of = {kind: max(s for s, k in zip(scales, kinds, strict=True) if k == kind) for kind in kinds}
        scales = [largest_of[kind] for kind in kinds]
    largest, where, noisy = 0.0, "", []
    worst = (1.0, "")
    for name, (difference, _), scale, random in zip(names, found, scales, randoms, strict=True):
        allowed = max(relative * scale, NOISE * random)
        if difference > allowed:
            excess = difference / allowed if allowed else np.inf
            text = f"{name} differs by {difference:.3g}, but only {allowed:.3g} is allowed"
            worst = max(worst, (excess, text), key=lambda one: one[0])
        elif difference > relative * scale:
            noisy.append(name)
        elif scale and difference / scale > largest:
            largest, where = difference / scale, name
    if worst[1]:
        raise VerificationError(f"{worst[1]}. {advice}")
    return Agreement(len(names), largest, where, tuple(noisy), relative)


def _all_differences(expected: Any, actual: Any) -> list[tuple[float, float]]:
    """Returns for each leaf its largest difference, and its largest magnitude in `expected` (0 for integers)."""
    wanted, given = (list(map(_numbers, jax.tree.leaves(tree))) for tree in (expected, actual))
    return [(float(pair[0]), float(pair[1])) for pair in jax.device_get(_differences(wanted, given))]


def _numbers(x: Any) -> jax.Array:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else jnp.asarray(x)


@jax.jit
def _differences(wanted: Sequence[jax.Array], given: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [_difference(want, got) for want, got in zip(wanted, given, strict=True)]


def _difference(want: jax.Array, got: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest difference of two arrays, and the largest finite magnitude in `want` (0 for integers).

    The difference is infinite if an element is NaN in one array only.
    """
    if want.size == 0:
        return jnp.float32(0), jnp.float32(0)
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        apart = jnp.abs(want.astype(jnp.float32) - got.astype(jnp.float32))
        return jnp.max(jnp.where(want == got, 0, jnp.maximum(apart, 1))), jnp.float32(0)
    wide = jnp.promote_types(want.dtype, jnp.float32) if jnp.finfo(want.dtype).bits > 8 else jnp.float32
    want, got = want.astype(wide), got.astype(wide)
    same = (want == got) | (jnp.isnan(want) & jnp.isnan(got))
    difference = jnp.where(same, 0, jnp.abs(want - got))
    magnitude = jnp.where(jnp.isfinite(want), jnp.abs(want), 0)
    return jnp.max(jnp.where(jnp.isnan(difference), jnp.inf, difference)), jnp.max(magnitude)
