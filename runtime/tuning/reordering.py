"""Orders a tuned step anew, and tunes it again, as long as this gains.

    reordering = Reordering(step, arguments, plan, told)
    plan, moved = reordering.ordered(plan)         # the order that the DP pairing finds with the plan's tuned times
    tuned = repeated(first, reordering.ordered, again, late, told)

Tuned collectives take other times, and slow computation less or more. So the order that was best before may be no
longer (`passes/plans/tuned_costs.py`). The step is compiled once in XLA's order. Each new order is searched in that
program, without a GPU, and becomes a part of the plan. Then the step is compiled in this order and tuned again.

Passes may have replaced collectives, or split chains into row parts, by the costs under NCCL's defaults. So the step is
also compiled without that. The form and order that are predicted to be fastest are kept.

A round counts only if the measured step is faster by more than chance. Otherwise the plan of the round before stays.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.communication.all_gather_decomposition import AllGatherDecomposition
from dhelix.passes.communication.exchange import REPLACED
from dhelix.passes.communication.gradient_reduction import GradientReduction
from dhelix.passes.communication.permute_decomposition import PermuteDecomposition
from dhelix.passes.communication.reduce_scatter_decomposition import ReduceScatterDecomposition
from dhelix.passes.communication.row_partition import RowPartition
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework.fingerprint import of_bytes
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.framework.report import CHANGED, UNCHANGED, Report
from dhelix.passes.hlo import HloModule
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import CollectivesSection, OrderSection, Plan
from dhelix.passes.plans.plan_making import make_plan
from dhelix.passes.plans.planned_order import PlannedOrder
from dhelix.passes.plans.tuned_collectives import bodies
from dhelix.passes.plans.tuned_costs import tuned_model
from dhelix.passes.tuning.collective_settings import CollectiveSettings
from dhelix.profiles import keys
from dhelix.profiles.keys import CollectiveKey
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.processes import agreement
from dhelix.runtime.processes.launch_settings import NO_GRAPHS
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.pass_lists import default_passes
from dhelix.runtime.step.target import Target
from dhelix.runtime.tuning.step_search import TUNED
from dhelix.runtime.tuning.tuned import Iteration, Tuned

MOST = 3
"""How often a step is ordered anew, at most."""

_LEAST_GAIN = 0.001
"""A new order must be predicted to be faster by this fraction. Otherwise it is only another one."""

_ORDERED = ("dp", "list")
_DECOMPOSITIONS = (ReduceScatterDecomposition, AllGatherDecomposition, PermuteDecomposition)


class Reordering:
    """Finds orders of one step for tuned collectives."""

    def __init__(
        self, step: InterleavedStep, arguments: Sequence[Any], plan: Plan, told: Callable[[str], None]
    ) -> None:
        """
        Args:
          step: the step that was tuned.
          arguments: of the step, static ones included. Only their shapes count.
          plan: the plan with the tuning. If it has an order, the step runs in it.
        """
        self._step, self._plan, self._told = step, plan, told
        self._arguments = tuple(jax.tree.map(_shape, arguments))
        self._programs: dict[CollectivesSection, bytes] = {}

    def ordered(self, plan: Plan) -> tuple[Plan, Collection[str]]:
        """The plan with the order that is best for its tuned collectives.

        All processes of a job must call this together.

        Returns:
          The plan, and the fingerprints of the bodies whose order differs from that of `plan`; none if the new order is
          not predicted to be faster.

        Raises:
          DhelixError: the step's order is not searched, or no plan can express it. The text says why the order stays.
        """
        self._told("orders the step for the tuned collectives")
        why, found, moved = "", plan, []
        try:
            before, found = self._order_of(plan), self._best(plan.tuning)
            least = self._seconds(before, plan.tuning) * (1.0 - _LEAST_GAIN)
            orders, new = ({b.fingerprint: b.order for b in one.bodies} for one in (before, found))
            if self._seconds(found, plan.tuning) < least:
                moved = [name for name in {**orders, **new} if orders.get(name) != new.get(name)]
        except DhelixError as error:
            why = " ".join(str(error).split())
        told = agreement.gathered("compare orders", why or of_bytes(plan_files.dumps(found).encode()))
        if why or len(set(told)) > 1:
            raise DhelixError(why or "the processes found different ones")
        return replace(found, tuning=plan.tuning, sharding=plan.sharding), moved

    def step(self, plan: Plan) -> InterleavedStep:
        """The step in the order of a plan. Its collectives have no settings yet."""
        options = self._step.options.but(
            plan=replace(plan, tuning=None),
            tuning=None,
            strict=False,  # a plan without an order may need more memory than is allowed
            schedule=StepOptions.schedule,
            skew=0,
            max_in_flight=None,
        )
        return InterleavedStep(self._step._function, options)

    def check(self, step: InterleavedStep) -> None:
        """Raises DhelixError if a step, which is compiled, does not run in the order of its plan."""
        done = step.report(*self._arguments)[PlannedOrder.name]
        if done.outcome not in (CHANGED, UNCHANGED):
            raise DhelixError(f"the new order is refused: {'; '.join(map(str, done.notes))}")

    def _order_of(self, plan: Plan) -> Plan:
        """A plan with the order in which a step with `plan` runs."""
        return plan if plan.bodies else self._ordered(None, self._structures[0])

    def _best(self, tuning: CollectiveSettings | None) -> Plan:
        """The form of the step, and its order, that are predicted to be fastest with these settings."""
        found = [self._ordered(tuning, self._structures[0])]
        for form in self._structures[1:]:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the form may need too much memory
                found.append(self._ordered(tuning, form))
        return min(found, key=lambda plan: self._seconds(plan, tuning))

    def _ordered(self, tuning: CollectiveSettings | None, structure: Plan) -> Plan:
        """The plan with the order that the step's schedule finds for these settings."""
        model = tuned_model(self._model, tuning)
        module = HloModule.from_bytes(self._program(structure))
        original, given = dict(module.schedule), self._step.options
        options = StepOptions(schedule=given.schedule, max_in_flight=given.max_in_flight)
        for one in default_passes(options, model=model, hardware=model.hardware, memory_limit=given.most_bytes):
            if one.stage is Stage.POST_SCHEDULER:
                one.run(module, PassContext())
        found = make_plan(module, original, model, structure)
        return replace(found, order=replace(found.order, memory_limit=Memory(module).needed(module)))

    def _seconds(self, plan: Plan, tuning: CollectiveSettings | None) -> float:
        """The predicted time of a step in a plan's order, with these settings."""
        module, costs = HloModule.from_bytes(self._program(plan)), tuned_model(self._model, tuning).costs()
        PlannedOrder(plan, sys.maxsize).run(module, PassContext())
        return simulate_module(module, costs.hardware, costs).seconds

    @cached_property
    def _model(self) -> CostModel:
        """The costs with which the step was ordered."""
        target = Target.of(self._step.lower(*self._arguments), self._step.options)
        if target is None or target.model is None:
            raise DhelixError("nothing was measured on these GPUs, so orders cannot be compared: run `dhelix profile`")
        return target.model

    @cached_property
    def _structures(self) -> list[Plan]:
        """Plans that make the step's strands and collectives, and no order.

        The first one makes the step as it was tuned. The others replace or split fewer collectives.
        """
        options, plan = self._step.options, self._plan
        if options.passes is not None or options.schedule not in _ORDERED:
            raise DhelixError("the step's schedule searches no order")
        if options.orders_by_plan:
            return [replace(plan, order=replace(plan.order, bodies=()), tuning=None, sharding=None)]
        report = self._step.report(*self._arguments)
        if report.left_alone:
            raise DhelixError(f"dhelix leaves the step as it is: {report.left_alone}")
        made = collectives_of(report)
        forms = dict.fromkeys((made, replace(made, row_parts=0, parted=()), replace(made, decomposed=())))
        order = OrderSection((), options.skew, options.max_in_flight or 0)
        return [Plan(plan.program, plan.target, form, order) for form in forms]

    def _program(self, structure: Plan) -> bytes:
        """The step's program in XLA's order, with a plan's collectives.

        Raises DhelixError if the computations of the first structure are not those of the tuned program.
        """
        form = structure.collectives
        if form not in self._programs:
            self._told("compiles the step in XLA's order, to order it anew")
            lowered = self.step(replace(structure, order=replace(structure.order, bodies=()))).lower(*self._arguments)
            module = compiled_module(lowered.compile(dict(NO_GRAPHS)))
            if form == self._structures[0].collectives:
                self._check_bodies(module)
            self._programs[form] = module.to_bytes()
        return self._programs[form]

    def _check_bodies(self, module: HloModule) -> None:
        """Raises DhelixError if a program lacks a computation that was tuned."""
        assert self._plan.tuning is not None
        known = {operators.fingerprint for operators in bodies(module, self._plan.target).values()}
        if missing := {one.body for one in self._plan.tuning.collectives} - known:
            raise DhelixError(f"in XLA's order, the step has other computations: it lacks {min(missing)}")


def collectives_of(report: Report) -> CollectivesSection:
    """What the passes of a step have replaced and split, as a plan says it."""
    entries = {entry.name: entry for entry in report if entry.outcome == CHANGED}

    def replaced(one: type[Any]) -> tuple[CollectiveKey, ...]:
        notes = entries[one.name].notes if one.name in entries else ()
        texts = dict.fromkeys(text for note in notes for text in note.facts.get(REPLACED, ()))
        return tuple(key for key in map(keys.parse, texts) if isinstance(key, CollectiveKey))

    parted, decomposed = replaced(RowPartition), tuple(key for one in _DECOMPOSITIONS for key in replaced(one))
    parts = RowPartition.parts if parted else 0
    return CollectivesSection(decomposed, parts, int(GradientReduction.name in entries), parted)


def _shape(leaf: Any) -> Any:
    """An array's shape in place of the array, which a step may have used up."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.aval.weak_type)


def repeated(
    first: Tuned,
    reorder: Callable[[Plan], tuple[Plan, Collection[str]]],
    again: Callable[[Plan, Tuned, Collection[str]], Tuned],
    late: Callable[[], bool],
    told: Callable[[str], None],
) -> Tuned:
    """Orders and tunes a step again, until a round gains nothing.

    Args:
      first: the tuning under the step's own order.
      reorder: gives the plan with a new order, and the bodies that have moved. Raises DhelixError if there is none.
      again: tunes the step in the order of a plan, from the settings of a tuning.
      late: whether the time is over.

    Returns:
      `first`, with the plan and the time of the best round, and a line for each round.
    """
    best, rounds = first, [Iteration(1, first.best, measured=first.found.measured)]
    notes: list[str] = []
    for number in range(2, MOST + 2):
        if late():
            notes.append("the time is over, so the step was not ordered anew again")
            break
        try:
            plan, moved = reorder(best.plan)
            if not moved:
                notes.append("no other order is predicted to be faster for the tuned collectives")
                break
            told(f"round {number}: compiles the step in another order of {len(moved)} computations")
            new = again(plan, best, moved)
        except (DhelixError, jax.errors.JaxRuntimeError) as error:
            notes.append(f"the order of round {number - 1} stays: {' '.join(str(error).split())[:300]}")
            break
        gains = new.best < best.best * (1.0 - max(new.chance, best.chance))
        rounds.append(Iteration(number, new.best, len(moved), new.found.measured, gains))
        told(str(rounds[-1]))
        notes += [note for note in new.notes if note not in first.notes]
        if not gains:
            break
        best = new
    return replace(
        first,
        plan=_with_base(best.plan, first),
        seconds=_with_best(first.seconds, first, best),
        notes=(*first.notes, *dict.fromkeys(notes)),
        iterations=tuple(rounds),
    )


def _with_best(seconds: Mapping[str, float], first: Tuned, best: Tuned) -> Mapping[str, float]:
    return seconds if best is first else {**seconds, TUNED: best.best}


def _with_base(plan: Plan, first: Tuned) -> Plan:
    """The plan, whose gain is over NCCL's defaults in the first order."""
    assert plan.tuning is not None and first.plan.tuning is not None
    return replace(plan, tuning=replace(plan.tuning, default_us=first.plan.tuning.default_us))
