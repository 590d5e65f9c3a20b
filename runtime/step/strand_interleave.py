"""Defines the decorator `strand_interleave`. It makes a train step whose micro-batches run as two strands.

While one strand runs the backward pass of a micro-batch, the other strand runs the forward pass of another one.

    @strand_interleave(donate_argnums=0)                    # the step has a loop over micro-batches, or
    @strand_interleave(microbatches=16, donate_argnums=0)   # it calls dhelix.value_and_grad
    def train_step(state, batch): ...

The decorator replaces `jax.jit`. Like `jax.jit`, it makes one program per kind of arguments (shapes, types, shardings,
static values, configuration). For each kind, it lowers the step, runs the LOWERED passes on the HLO, and compiles the
result. On GPUs, the compiler calls the passes of the later stages. If no pass changes anything, or on a single device,
the step runs as `jax.jit` would run it, and a line in the log says why. With DHELIX=off in the environment, no pass
runs, but `value_and_grad` still splits its batch into micro-batches.

The decorator touches no device before the first call, so `jax.distributed.initialize()` works after decoration.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.processes.first_run import decorating
from dhelix.runtime.processes.launch_settings import calls_outside_graphs
from dhelix.runtime.step.frameworks import fixed_leaves, nnx_front
from dhelix.runtime.step.frameworks.fixed_leaves import FixedLeavesFront
from dhelix.runtime.step.frameworks.nnx_front import NnxFront, is_nnx_jitted
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.loaded_options import loaded
from dhelix.runtime.step.options import OFF, StepOptions, with_options_of


@with_options_of(StepOptions)
def strand_interleave(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Decorates a train step, which may be a plain function or already jitted.

        @strand_interleave(microbatches=4, donate_argnums=0)
        def train_step(state, batch):
            loss, grads = value_and_grad(loss_fn)(state.params, batch)
            ...

    Args:
      function: the step.

    Options:
      <options>

    Returns:
      An `InterleavedStep`. Without `function`, a decorator that makes an `InterleavedStep`.

    Raises:
      DhelixError: options are invalid or do not fit together. The first call also raises this error in two cases: with
        `strict`, if the step would be left alone; with `verify`, if the step does not compute the same as the plain
        step.
    """
    with decorating():
        known = inspect.signature(StepOptions).parameters
        for name in sorted(options.keys() - known):
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]!r}?" if close else "help(dhelix.strand_interleave) lists them"
            raise DhelixError(f"{name!r} is not an option of strand_interleave or jax.jit: {advice}")
        chosen = StepOptions(**options)
    return functools.partial(interleaved, options=chosen) if function is None else interleaved(function, chosen)


@decorating()
def interleaved(function: Callable[..., Any], options: StepOptions) -> InterleavedStep:
    """Does the same as `strand_interleave`, but takes the options as `StepOptions` instead of keywords."""
    step, front = function, None
    if unwrapped := fixed_leaves.unwrap_filter_jit(function):
        step, donated = unwrapped
        front, options = FixedLeavesFront, options.but(**{**donated, **options.jit})
    elif nnx_front.has_state_shardings(options.jit):
        front = NnxFront
    _check_function(step, options)
    _check_pipeline(options)
    if options.matmuls != OFF and not (jax_compat.is_jitted(step) or is_nnx_jitted(step)):
        options = options.but(compiler_options={**calls_outside_graphs(os.environ), **(options.xla or {})})
    return InterleavedStep(step, loaded(options), front=front)


def _check_pipeline(options: StepOptions) -> None:
    if options.pipeline is None:
        return
    if not isinstance(options.pipeline, Fold):
        raise DhelixError(f"pipeline={options.pipeline!r}: give a dhelix.Fold(stages=...)")
    if options.microbatches is None:
        raise DhelixError("pipeline= needs microbatches=: give the number of micro-batches per step")
    if options.schedule == "intra_batch":
        raise DhelixError(f"schedule={options.schedule!r} has no pipeline: use dp, list or xla")
    if options.verify:
        raise DhelixError(
            "verify= compares with the step without strands, which does not exist with pipeline=: compare a few steps "
            "with those of an unfolded state, as docs/guide/pipeline.md shows"
        )


def _check_function(function: Callable[..., Any], options: StepOptions) -> None:
    name = getattr(function, "__name__", repr(function))
    if not callable(function):
        raise DhelixError(f"strand_interleave decorates a function, not {type(function).__name__}")
    if jax_compat.is_jitted(function) or is_nnx_jitted(function):
        if options.jit:
            raise DhelixError(f"{name} is already jitted: give {', '.join(sorted(options.jit))} to that jit")
        if options.microbatches is not None:
            raise DhelixError(
                f"{name} is already jitted and may be traced: decorate the plain function with "
                "strand_interleave(microbatches=...), which takes the options of jax.jit"
            )
    elif isinstance(function, InterleavedStep):
        raise DhelixError(f"{name} is already interleaved: remove one of its two strand_interleave decorators")
    elif hasattr(function, "lower"):
        raise DhelixError(
            f"{name} is neither a plain function nor the result of jax.jit, nnx.jit or eqx.filter_jit: decorate the"
            " function itself"
        )
