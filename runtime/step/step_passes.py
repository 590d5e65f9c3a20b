"""Makes the passes of one program: a list of `pass_lists.py`, adapted to the program's target, plan and pipeline.

`pass_manager(options, target, lowered)` returns the passes in a `PassManager`.
"""

from __future__ import annotations

import jax

from dhelix.passes import jax_compat
from dhelix.passes.communication.collective_matmul.pattern import Placed
from dhelix.passes.framework.manager import Pass, PassManager, Stage, say_once
from dhelix.passes.ordering.collective_schedule import list_order
from dhelix.passes.ordering.exclusive_kernels import ExclusiveKernels
from dhelix.passes.ordering.strand_pairing import pairing_order
from dhelix.runtime.step.collective_matmuls.jax_forms import collective_matmul_passes
from dhelix.runtime.step.collective_matmuls.weighing import Weighing
from dhelix.runtime.step.options import AUTO, OFF, StepOptions
from dhelix.runtime.step.pass_lists import default_passes, planned_passes, strand_passes
from dhelix.runtime.step.target import Target


def pass_manager(
    options: StepOptions,
    target: Target | None = None,
    lowered: jax.stages.Lowered | None = None,
    memory_limit: int | None = None,
    paired: tuple[Placed, ...] = (),
    step: str = "",
) -> PassManager:
    """Returns the passes for a program.

    Args:
      options: options of the step.
      target: the GPUs that the program is for; None for other devices.
      lowered: the program. None: the passes are those for CPU devices, which need no costs.
      memory_limit: the effective limit in bytes (`plain_step.memory_limit`). It replaces the limit in `options`.
      paired: sites whose collectives stay, although a collective matmul is possible there (`weighed`).
      step: label of the step in the log.
    """
    passes = options.passes
    if passes is None:
        passes = (*_collective_matmuls(options, lowered, paired), *_ordering(options, target, lowered, memory_limit))
    return PassManager(passes, options.disable, options.strict, options.dump_to, step)


def _ordering(
    options: StepOptions, target: Target | None, lowered: jax.stages.Lowered | None, memory_limit: int | None
) -> list[Pass]:
    """The passes that make strands and order them, by the schedule or plan.

    For a pipeline, the LOWERED passes are left out, because the pipeline's executor makes the strands.
    """
    if options.plan is None:
        given = {} if target is None else {"model": target.model, "hardware": target.hardware}
        passes = default_passes(options, memory_limit=memory_limit, **given)
    else:
        given = {} if target is None else {"hardware": target.hardware}
        passes = planned_passes(options.loaded_plan, memory_limit, **given)
        if target is not None:
            target.compare(options.loaded_plan, options)
        elif lowered is not None:
            line = (
                "a plan orders operators only on GPUs: on other devices only its structure is used (skew, reduced "
                "layers)"
            )
            say_once(line, (line,))
    return [one for one in passes if options.pipeline is None or one.stage is not Stage.LOWERED]


def _collective_matmuls(
    options: StepOptions, lowered: jax.stages.Lowered | None, paired: tuple[Placed, ...]
) -> tuple[Pass, ...]:
    """The collective-matmul passes. They run first, because other passes change collectives and their order.

    If there are none, ExclusiveKernels runs alone, because the user's own code may call kernels that need it.
    """
    devices = [] if lowered is None else jax_compat.devices(lowered)
    planned = options.plan is not None and options.matmuls == AUTO  # the plan says what replaces its collectives
    form = OFF if planned else options.matmuls
    return collective_matmul_passes(devices, form, options=options.xla, paired=paired) or (ExclusiveKernels(),)


def weighed(
    options: StepOptions, target: Target | None, lowered: jax.stages.Lowered, memory_limit: int | None
) -> tuple[Placed, ...]:
    """Returns the sites whose collectives stay, because a collective matmul there is predicted to make the step slower.

    A site is a collective with the matrix product next to it. The prediction needs measured costs, and a schedule that
    searches the order. Without these, the result is empty.
    """
    searched = options.passes is None and options.plan is None and options.limited
    if options.matmuls != AUTO or not searched or target is None or target.model is None:
        return ()
    quiet = options.but(strict=False, dump_to=None)
    order = pairing_order if options.schedule == "dp" else list_order
    weighing = Weighing(
        lowered, lambda paired: pass_manager(quiet, target, lowered, memory_limit, paired), target.model, order,
        memory_limit, options.max_in_flight,
    )  # fmt: skip
    try:
        found = weighing.weighed()
    except Exception as error:  # a failed prediction must not stop a job
        if options.strict:
            raise
        say_once(
            f"collective matmuls are chosen by their own times, without a prediction of the step: {error}", ("weighed",)
        )
        return ()
    return () if found is None else found.paired


def without_plan(options: StepOptions) -> StepOptions:
    """Returns `options` without the plan. Both strands then run in XLA's order."""
    known = [one.name for one in strand_passes()]
    disabled = (options.disable,) if isinstance(options.disable, str) else options.disable
    known = tuple(name for name in known if name in disabled)
    return options.but(plan=None, schedule="xla", memory_limit=None, disable=known)
