r"""Optimizers by name, learning-rate schedules, clipping, and steps that are skipped.

adamw              Optax's, with b2 0.95 and weight decay 0.1 on matrices
lion               Optax's, with weight decay 1.0 on matrices
adafactor, sgd ... Optax's defaults; `--optimizer_options` sets other values

lr |   _______                wsd: warm-up, stable, decay over the last steps
   |  /       \               cosine: warm-up, then a cosine
   | /         \___           linear: warm-up, then a line; constant: warm-up only
   +---------------- steps
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dhelix.errors import DhelixError, first_line
from dhelix.launch.train.options import Options

_USUAL: dict[str, dict[str, Any]] = {
    "adamw": {"b2": 0.95, "weight_decay": 0.1},
    "lion": {"weight_decay": 1.0},
}
"""Values for language models, in place of Optax's defaults."""


def optimizer(options: Options) -> optax.GradientTransformation:
    """The optimizer of a run. It clips gradients first, and skips an update that is not finite if asked to.

    Raises:
      DhelixError: Optax has no such optimizer, or the optimizer does not take an option.
    """
    made = _named(options.optimizer, options.optimizer_options or "", learning_rate(options))
    clip = optax.clip_by_global_norm(options.clip) if options.clip else optax.identity()
    made = optax.chain(clip, made)  # the state has the same form for any clip, so that a resumed run may change it
    return skipping(made) if options.on_nan == "skip" else made


def learning_rate(options: Options) -> optax.Schedule:
    """The learning rate by step, counted from 0: a linear warm-up, then the schedule.

    The first step has a part of `lr` already, and the last one has `lr_end` x `lr`.
    """
    warmup = warmup_steps(options)
    left = max(options.steps - warmup, 1)
    if options.decay_steps is not None and options.lr_schedule != "wsd":
        raise DhelixError(f"--decay_steps is for --lr_schedule wsd; with {options.lr_schedule}, leave it out")
    if (options.decay_steps or 0) > left:
        raise DhelixError(f"--decay_steps {options.decay_steps} is more than the {left} steps after the warm-up")
    decay = min(decay_steps(options) or 1, left)
    lr, end = options.lr, options.lr * options.lr_end
    rises = optax.linear_schedule(0.0, lr, warmup)
    then: dict[str, optax.Schedule] = {
        "cosine": optax.cosine_decay_schedule(lr, left, options.lr_end),
        "linear": optax.linear_schedule(lr, end, left),
        "constant": optax.constant_schedule(lr),
        "wsd": optax.linear_schedule(lr, end, decay, transition_begin=left - decay),
    }
    joined = optax.join_schedules([rises, then[options.lr_schedule]], [warmup])
    return lambda step: joined(step + 1)


def warmup_steps(options: Options) -> int:
    """The steps of the warm-up: the given number, or a tenth of all, at most 100."""
    return options.warmup if options.warmup is not None else min(100, max(1, options.steps // 10))


def decay_steps(options: Options) -> int | None:
    """The steps at the end over which `wsd` decays; None: another schedule, which decays all the time."""
    return (options.decay_steps or max(1, options.steps // 5)) if options.lr_schedule == "wsd" else None


def values_in_words(options: Options) -> str:
    """The values of the optimizer that are not Optax's defaults, in the order of their names: b2=0.95,..."""
    parts = (part.partition("=") for part in (options.optimizer_options or "").split(",") if part.strip())
    given = {name.strip(): value.strip() for name, _, value in parts}
    values = {name: str(value) for name, value in _USUAL.get(options.optimizer, {}).items()} | given
    return ",".join(f"{name}={value}" for name, value in sorted(values.items()))


def is_matrix(path: tuple[Any, ...]) -> bool:
    """Whether a parameter is a matrix or a table, by its name: neither a norm nor a bias. Layers may be stacked."""
    name = str(getattr(path[-1], "key", path[-1]))
    return not (name.endswith(("norm", "bias")) or name[:1] == "b")


def matrices(params: Any) -> Any:
    """True for each matrix of `params`, False for all else: what weight decay applies to."""
    return jax.tree_util.tree_map_with_path(lambda path, _: is_matrix(path), params)


def skipping(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, which changes nothing in a step whose gradients are not all finite.

    Updates and states are selected element by element, so XLA fuses the choice with the update.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        finite = jnp.isfinite(optax.tree.norm(updates))
        made, new = inner.update(updates, state, params)

        def chosen(yes: Any, no: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), yes, no)

        return chosen(made, jax.tree.map(jnp.zeros_like, made)), chosen(new, state)

    return optax.GradientTransformation(inner.init, update)


def _named(name: str, text: str, schedule: optax.Schedule) -> optax.GradientTransformation:
    make = getattr(optax, name, None)
    if not inspect.isfunction(make) or "learning_rate" not in inspect.signature(make).parameters:
        raise DhelixError(
            f"--optimizer {name} is no function of optax that makes an optimizer; give adamw, lion or another one"
        )
    allowed = inspect.signature(make).parameters
    given = _USUAL.get(name, {}) | _parsed(name, text, [p for p in allowed if p != "learning_rate"])
    if "mask" in allowed and given.get("weight_decay"):
        given.setdefault("mask", matrices)
    try:
        made = make(schedule, **given)
        example = {"w": jnp.zeros((2, 2))}
        jax.eval_shape(lambda tree: made.update(tree, made.init(tree), tree), example)
    except Exception as error:  # of any type: they come from inside Optax
        why = f"--optimizer_options {text}: " if text else ""
        raise DhelixError(f"{why}Optax's {name} cannot train this way ({first_line(error)[:200]})") from None
    return made


def _parsed(name: str, text: str, allowed: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in allowed:
            raise DhelixError(f"--optimizer_options {part}: {name} takes {', '.join(allowed)}; write b1=0.9,b2=0.95")
        if key.endswith("dtype"):
            found[key] = _dtype(part, value)
            continue
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise DhelixError(f"--optimizer_options {part}: give a number, True, False or None") from None
    return found


def _dtype(part: str, value: Any) -> Any:
    try:
        kind = jnp.dtype(value)
    except TypeError:
        kind = None
    if kind is None or not jnp.issubdtype(kind, jnp.floating):
        raise DhelixError(f"--optimizer_options {part}: states are floating-point; use float32 or bfloat16")
    return kind
