"""Compares the planner's closest candidates by the programs that would run.

    compiled = finalists(step, args, states, axes, near(found), target)       # {factors: seconds}
    found, lines = by_programs(found, compiled)                               # the fastest of them is the best

The planner's formulas know neither the copies around collectives nor the order that the passes find. They expected
ZeRO-1 to be up to 10 % faster than plain data parallelism where both were equally fast (docs/results/states-2xh200.md).
So candidates within `NEAR` of the best are compiled with their states in place, as they would run, and the evaluator
predicts their schedules.

Cost: a compilation for each of at most `MOST` candidates. If only one candidate is near, nothing is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.framework.manager import say_once
from dhelix.passes.framework.units import milliseconds
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.constraints import Axes
from dhelix.passes.sharding.factors import Factors
from dhelix.passes.sharding.planner import Candidate, Planned
from dhelix.runtime.compiler import deviceless, lowering, tuned
from dhelix.runtime.sharding.nnx_objects import unwrapped
from dhelix.runtime.sharding.placed_states import state_shardings, without_axes
from dhelix.runtime.sharding.state_plan import StatePlan
from dhelix.runtime.step.frameworks.nnx_front import is_nnx_jitted
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.strand_interleave import interleaved
from dhelix.runtime.step.target import Target

NEAR = 0.1
"""Candidates whose expected step takes at most this fraction longer than the best one's are compiled."""

MOST = 4


def near(found: Planned) -> tuple[Candidate, ...]:
    """The candidates that the planner's formulas cannot tell apart, the planner's choice first; none if it is alone."""
    limit = (1.0 + NEAR) * min(candidate.times.step for candidate in found.candidates)
    others = sorted((c for c in found.alternatives if c.times.step <= limit), key=lambda c: c.times.step)
    return (found.best, *others[: MOST - 1]) if others else ()


def finalists(
    step: Callable[..., Any],
    args: Sequence[Any],
    states: frozenset[int],
    axes: Axes,
    candidates: Sequence[Candidate],
    target: Target,
) -> Mapping[Factors, float]:
    """Seconds of a step under each candidate's factors, by the evaluator; empty if one of them cannot be compiled.

    A line in the log says that this happens, because it takes a while.

    Args:
      step: the step for plain data parallelism, as in `plan_sharding`.
      args: its arguments.
      states: numbers of the arguments (leaves, in order) that are states.
      target: the GPUs, and the costs of operators on them.
    """
    names = ", ".join(_name(one.factors) for one in candidates)
    say_once(
        f"the planner compiles {names} as they would run, because by formulas their times differ by less than "
        f"{NEAR:.0%} (compare=False and --nocompare leave this out)",
        (names,),
    )
    try:
        return {one.factors: _seconds(step, args, states, axes, one.factors, target) for one in candidates}
    except DhelixError as error:
        say_once(f"closest candidates are not compared by their programs: {error}", (str(error),))
        return {}


def by_programs(found: Planned, compiled: Mapping[Factors, float]) -> tuple[Planned, tuple[str, ...]]:
    """The planner's result if compiled programs decide, and a line that says so."""
    if found.best.factors not in compiled or len(compiled) < 2:
        return found, ()
    best = min(compiled, key=lambda factors: compiled[factors])
    chosen = next(c for c in found.candidates if c.factors == best)
    rows = ", ".join(
        f"{_name(c.factors)} {milliseconds(compiled[c.factors])} ({milliseconds(c.times.step)} by formulas)"
        for c in sorted((c for c in found.candidates if c.factors in compiled), key=lambda c: compiled[c.factors])
    )
    line = f"closest candidates, compiled as they would run: {rows}"
    return dataclasses.replace(found, best=chosen, compiled=dict(compiled)), (line,)


def _seconds(
    step: Callable[..., Any],
    args: Sequence[Any],
    states: frozenset[int],
    axes: Axes,
    factors: Factors,
    target: Target,
) -> float:
    states_plan = StatePlan(factors, axes)
    if isinstance(step, InterleavedStep):
        made = step.but(sharding=states_plan)
    else:
        profile = None if target.model is None else target.model.profile
        options = StepOptions(sharding=states_plan, profile=profile)
        jitted = jax_compat.is_jitted(step) or is_nnx_jitted(step)  # has options of its own
        made = interleaved(step, options if jitted else options.but(donate_argnums=tuple(_holding(args, states))))
    lowered = unwrapped(made.lower(*_placed(args, states, states_plan, axes)))
    if deviceless.are_attached(jax_compat.devices(lowered)):
        return step_parts(lowering.compiled_module(lowered.compile()), target.costs()).seconds
    scheduled = tuned.scheduled(lowered)
    if scheduled is None:
        return step_parts(lowering.compiled_module(tuned.compile(lowered)), target.costs()).seconds
    return step_parts(HloModule.from_bytes(scheduled), target.costs()).seconds


def _holding(args: Sequence[Any], states: frozenset[int]) -> dict[int, int]:
    """The positions of the arguments that hold states, each with the number of its first leaf."""
    found, first = dict[int, int](), 0
    for position, argument in enumerate(args):
        count = len(jax.tree.leaves(argument))
        if states & set(range(first, first + count)):
            found[position] = first
        first += count
    return found


def _placed(args: Sequence[Any], states: frozenset[int], plan: StatePlan, axes: Axes) -> tuple[Any, ...]:
    """The arguments, where those that hold states are shapes with the states' shardings under `plan`."""
    placed = list(args)
    for position, first in _holding(args, states).items():
        leaves, tree = jax.tree.flatten(args[position])
        whole = [without_axes(leaf, axes) if first + n in states else leaf for n, leaf in enumerate(leaves)]
        split = jax.tree.leaves(state_shardings(jax.tree.unflatten(tree, whole), plan))
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one) if first + n in states else leaf
            for n, (leaf, one) in enumerate(zip(whole, split, strict=True))
        ]
        placed[position] = jax.tree.unflatten(tree, shapes)
    return tuple(placed)


def _name(factors: Factors) -> str:
    return factors.strategy or str(factors)
