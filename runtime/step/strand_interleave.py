"""`@strand_interleave`: a train step whose micro-batches run as two strands.

    @strand_interleave(donate_argnums=0)                    # the step has a loop over micro-batches, or
    @strand_interleave(microbatches=16, donate_argnums=0)   # it calls dhelix.value_and_grad
    def train_step(state, batch): ...

It stands in place of `jax.jit`. For each kind of arguments (told apart as by `jax.jit`: shapes, types,
shardings, static values, configuration) the step is lowered, its HLO goes through the LOWERED passes, and the
result is compiled; on GPUs the compiler calls the passes of the later stages. Where no pass changes anything,
the step is what `jax.jit` makes of it, and a line in the log says why; so too on one device. With
DHELIX=off in the environment no pass runs; a batch that `value_and_grad` splits into micro-batches stays split.

Nothing here touches a device before the first call: `jax.distributed.initialize()` works after decoration.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import jax

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.framework.manager import Pass
from dhelix.passes.plans.pairing_plan import PairingPlan
from dhelix.profiles.collective_matmul.sites import Form
from dhelix.profiles.profile import Profile
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.processes.first_run import decorating
from dhelix.runtime.processes.launch_settings import calls_outside_graphs
from dhelix.runtime.step.collective_matmul_pass import OFF
from dhelix.runtime.step.frameworks import fixed_leaves, nnx_front
from dhelix.runtime.step.frameworks.fixed_leaves import FixedLeavesFront
from dhelix.runtime.step.frameworks.nnx_front import NnxFront, is_nnx_jitted
from dhelix.runtime.step.gradients.microbatch_loop import check_reduction
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.option_types import Decorator, Options, Reduce, Schedule
from dhelix.runtime.step.schedules import AUTO, DEFAULT, Choice, collective_matmul_of

_JIT_OPTIONS = frozenset(inspect.signature(jax.jit).parameters) - {"fun"}


@overload
def strand_interleave[**P, R](function: Callable[P, R], /, **options: Unpack[Options]) -> InterleavedStep[P, R]: ...
@overload
def strand_interleave(**options: Unpack[Options]) -> Decorator: ...
@decorating()
def strand_interleave(
    function: Callable[..., Any] | None = None,
    /,
    *,
    microbatches: int | None = None,
    reduce: Reduce = "mean",
    schedule: Schedule = DEFAULT,
    profile: str | Path | Profile | None = AUTO,
    plan: str | Path | PairingPlan | None = None,
    memory_limit: int | None = None,
    max_in_flight: int | None = None,
    skew: int = 0,
    pipeline: Fold | None = None,
    collective_matmul: str | Form | None = None,
    strict: bool = False,
    verify: bool = False,
    passes: Sequence[Pass] | None = None,
    disable: Collection[str] = (),
    dump_to: str | Path | None = None,
    **jit_options: Any,
) -> Any:
    """Decorates a train step, plain or already jitted.

        @strand_interleave(microbatches=4, donate_argnums=0)
        def train_step(state, batch):
            loss, grads = value_and_grad(loss_fn)(state.params, batch)
            ...

    Args:
      function: the step.
      microbatches: into how many micro-batches `dhelix.value_and_grad` splits its batch. None: the step has a
        loop over micro-batches of its own, which is used as it stands.
      reduce: how losses and gradients of micro-batches combine: "mean", "sum", "weighted".
      schedule: which strands run together, and in which order on GPUs; one of `schedules.SCHEDULES`.
      profile: where costs come from: "auto", the profile of the GPUs that the step is lowered for, shipped or the
        user's own, and where there is none a roofline; the path of one, or a `Profile`; None, the roofline.
      plan: of `dhelix plan`, its path or itself: orders as it says, in place of `schedule`. Where it does not fit the
        step, XLA's order stays, and a line in the log says why; `strict` raises.
      memory_limit: bytes that the step may need beside its arguments on each GPU; by default ("dp", "list" and plans)
        3 % more than the plain step, arguments and all, for which XLA schedules that, too (`memory_need.py`).
        Where no order keeps to it the plain step runs, and a line says which limit would do.
      max_in_flight: how many collectives of one lane may be between their start and their end; None: as many as are
        fastest.
      skew: how many layers the strands are apart. First and last layers of the step then run beside another micro-batch
        too, which pays where communication is slow and micro-batches are few, and so many more layers' residuals are
        alive; takes at least 3 micro-batches (`passes/strands/strand_skew.py`).
      pipeline: stages that `dhelix.value_and_grad` sends the micro-batches through; needs `microbatches`, a model that
        is a scan over layers, and a state that `Fold.fold` has folded (docs/pipeline.md).
      collective_matmul: what stands in place of collectives beside matrix products, on GPUs: "off", they stay; "auto",
        the form that was measured to be the fastest on these GPUs, if any is faster, and with strands where the step is
        predicted to be faster by it; or a form for all that can have it, such as "ring" or "hybrid:4"
        (docs/collective_matmul.md). CUDA graphs hold no custom calls of the step then; one that is jitted already
        takes kernels only if XLA_FLAGS say so. None: "auto" with schedule="intra_batch", else "off".
      strict: raise where the step would be left alone.
      verify: at the first call with arguments of a kind, compare with the plain step, on copies of the
        arguments (`runtime.step.verification`).
      passes: what to run in place of `schedules.default_passes(schedule)`.
      disable: names of passes not to run.
      dump_to: folder for the HLO before and after each pass.
      jit_options: of `jax.jit`: donate_argnums, static_argnames, in_shardings, ... Not for a jitted function,
        which keeps its own.

    Returns:
      An `InterleavedStep`, or without `function` a decorator that makes one.

    Raises:
      DhelixError: options that mean nothing or do not fit each other; at the first call, with `strict`, a step that
        would be left alone, and with `verify`, one that computes something else.
    """
    if function is None:
        return functools.partial(
            strand_interleave, microbatches=microbatches, reduce=reduce, schedule=schedule, profile=profile,
            plan=plan, memory_limit=memory_limit, max_in_flight=max_in_flight, skew=skew, pipeline=pipeline,
            collective_matmul=collective_matmul, strict=strict, verify=verify, passes=passes, disable=disable,
            dump_to=dump_to, **jit_options,
        )  # fmt: skip
    step, front = function, None
    if unwrapped := fixed_leaves.unwrap_filter_jit(function):
        step, donated = unwrapped
        front, jit_options = FixedLeavesFront, {**donated, **jit_options}
    elif nnx_front.has_state_shardings(jit_options):
        front = NnxFront
    _check_options(step, microbatches, reduce, jit_options)
    collective_matmul = collective_matmul_of(collective_matmul, schedule, plan, passes)
    if collective_matmul != OFF and not (jax_compat.is_jitted(step) or is_nnx_jitted(step)):
        given = jit_options.get("compiler_options") or {}
        jit_options["compiler_options"] = {**calls_outside_graphs(os.environ), **given}
    if pipeline is not None:
        _check_pipeline(pipeline, microbatches, schedule, verify)
    choice = Choice.of(
        schedule, profile, plan, memory_limit, max_in_flight, passes, disable=disable, strict=strict, dump_to=dump_to,
        compiler_options=jit_options.get("compiler_options"), pipelined=pipeline is not None,
        collective_matmul=collective_matmul, skew=skew,
    )  # fmt: skip
    even_on_one_device = strict or passes is not None
    return InterleavedStep(
        step, microbatches, reduce, choice, verify, jit_options, even_on_one_device, pipeline, front=front
    )


def _check_pipeline(pipeline: Fold, microbatches: int | None, schedule: str, verify: bool) -> None:
    if not isinstance(pipeline, Fold):
        raise DhelixError(f"pipeline={pipeline!r}: give a dhelix.Fold(stages=...)")
    if microbatches is None:
        raise DhelixError("pipeline= needs microbatches=: how many go through the stages in one step")
    if schedule in ("forward_forward", "backward_backward", "intra_batch"):
        raise DhelixError(f"schedule={schedule!r} has no pipeline: take dp, list, xla or round_robin")
    if verify:
        raise DhelixError(
            "verify= compares with the step without strands, and with pipeline= there is none: compare a few steps with"
            " those of an unfolded state, as docs/pipeline.md shows"
        )


def _check_options(
    function: Callable[..., Any], microbatches: int | None, reduce: str, jit_options: dict[str, Any]
) -> None:
    name = getattr(function, "__name__", repr(function))
    if not callable(function):
        raise DhelixError(f"strand_interleave decorates a function, not {type(function).__name__}")
    if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
        raise DhelixError(f"microbatches={microbatches!r}: give how many, 1 or more, or None for the step's own loop")
    check_reduction(reduce)
    for option in sorted(set(jit_options) - _JIT_OPTIONS):
        raise DhelixError(f"{option!r} is an option of neither strand_interleave nor jax.jit")
    if jax_compat.is_jitted(function) or is_nnx_jitted(function):
        if jit_options:
            raise DhelixError(f"{name} is jitted already: give {', '.join(sorted(jit_options))} to that jit")
        if microbatches is not None:
            raise DhelixError(
                f"{name} is jitted already, and may be traced: decorate the plain function with"
                " strand_interleave(microbatches=...), which takes the options of jax.jit"
            )
    elif isinstance(function, InterleavedStep):
        raise DhelixError(f"{name} is interleaved already: leave out one of the two strand_interleave around it")
    elif hasattr(function, "lower"):
        raise DhelixError(
            f"{name} is neither a plain function nor the result of jax.jit, nnx.jit or eqx.filter_jit: decorate the"
            " function itself"
        )
