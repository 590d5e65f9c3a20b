"""Decides, before compilation, at which sites of a step with two strands the collectives stay.

A site is a collective with the matrix product next to it. A collective matmul may replace it.

    step -> LOWERED passes: two strands -> XLA up to its schedule, all collectives in place
         -> predict the step with collective matmuls at some sites, at others, or at none
         -> XLA up to its schedule with the chosen sites: predict again; if the step is no faster, choose no site

A collective matmul replaces its collective before scheduling (PRE_SCHEDULER). But only a scheduled program shows what
the collective costs beside the other strand's compute. So the program is first scheduled with all collectives in place,
which takes about a tenth of a compilation. `passes/communication/collective_matmul/site_choice.py` weighs the sites in
this schedule. It would be more accurate to schedule the program anew for each of some twenty choices, but this takes
too long. Only the final choice is scheduled again. This schedule also shows the copies that a collective matmul needs
next to its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from absl import logging

from dhelix.passes.communication.collective_matmul.collective_matmul import CollectiveMatmul
from dhelix.passes.communication.collective_matmul.pattern import Placed
from dhelix.passes.communication.collective_matmul.site_choice import Candidate, Trial, Weighed, choose, mark
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.collective_schedule import list_order
from dhelix.passes.ordering.order_rules import Scheduler
from dhelix.runtime.compiler import lowering, scheduled_only


class Weighing:
    """Weighs the sites of one step: compares predictions of the step with and without collective matmuls.

    Args:
      lowered: the lowered step before any pass.
      passes: function that makes the step's passes from the patterns and places of sites whose collectives stay.
      model: measured costs.
      order: the function with which the step's passes search for an order.
      memory_limit, max_in_flight: limits of the order.
    """

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        passes: Callable[[tuple[Placed, ...]], PassManager],
        model: CostModel,
        order: Scheduler,
        memory_limit: int | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        self._lowered, self._passes, self._model, self._order = lowered, passes, model, order
        self._limits = memory_limit, max_in_flight

    def weighed(self) -> Weighed | None:
        """Returns the decision; None if the step has no sites, or XLA makes no schedule from which to decide."""
        trial = self._trial()
        if trial is None or not trial.placed:
            return None
        found = choose(trial, list_order, self._order)
        if found.taken:
            found = found.checked(predicted(self._lowered, self._passes(found.paired), self._model))
        logging.info("predicted together with strands: %s", found)
        return found

    def _trial(self) -> Trial | None:
        """The step in XLA's order, with all collectives in place.

        None if the step has no strands, no collective-matmul pass, or no schedule.
        """
        source, manager = lowering.hlo_bytes(self._lowered), self._passes(())
        if manager.runs_at(Stage.LOWERED):
            changed, _ = manager.run(Stage.LOWERED, source)
            if changed is None:
                return None
            source = changed
        passes = manager.enabled
        number, forms = next(
            ((n, one.forms) for n, one in enumerate(passes) if isinstance(one, CollectiveMatmul)), (0, None)
        )
        if forms is None:
            return None
        earlier, later = PassManager(passes[:number]), PassManager(passes[number + 1 :])
        candidates: list[Candidate] = []

        def before(module: bytes) -> bytes:
            view = HloModule.from_bytes(earlier.run(Stage.PRE_SCHEDULER, module)[0] or module)
            candidates.extend(mark(view, forms))
            marked = view.to_bytes()
            return later.run(Stage.PRE_SCHEDULER, marked)[0] or marked

        module = scheduled_only.scheduled(self._lowered, source, "trial", before)
        if module is None:
            return None
        return Trial(HloModule.from_bytes(module), candidates, self._model, *self._limits)


def predicted(lowered: jax.stages.Lowered, manager: PassManager, model: CostModel) -> float:
    """Predicts the seconds that a step takes with these passes. Infinite if XLA makes no schedule of the step."""
    source = lowering.hlo_bytes(lowered)
    if manager.runs_at(Stage.LOWERED):
        source = manager.run(Stage.LOWERED, source)[0] or source
    module = scheduled_only.scheduled(
        lowered, source, "predicted", lambda module: manager.run(Stage.PRE_SCHEDULER, module)[0]
    )
    if module is None:
        return math.inf
    module = manager.run(Stage.POST_SCHEDULER, module)[0] or module
    return simulate_module(HloModule.from_bytes(module), model.hardware, model.costs()).seconds
