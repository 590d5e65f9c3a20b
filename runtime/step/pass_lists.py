"""The passes that a step goes through: one list for each schedule, and one for plans.

    schedule            strands                     order of operators on GPUs
    dp, the default     backward beside forward     pairing by dynamic programming (DHelix section 4.2)
    list                backward beside forward     list scheduling of collectives
    xla                 backward beside forward     XLA's own
    intra_batch         none                        the search of dp inside one micro-batch (MegaScale)
    a plan              backward beside forward     the plan's

Lists hold classes, with what is fixed of their options. The rest of its options a pass is given by name: a field
`max_in_flight` is the step's `max_in_flight`, `model` and `hardware` are its target's. So a new option of a step that a
pass has a field for needs nothing here.

What order cannot hide inside one micro-batch, partitioned matrix products can: so `intra_batch` comes with
collective_matmul="auto" unless the user says otherwise (`options.StepOptions.matmuls`), and the others without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from dhelix.passes.communication.all_gather_decomposition import AllGatherDecomposition
from dhelix.passes.communication.gradient_reduction import GradientReduction
from dhelix.passes.communication.permute_decomposition import PermuteDecomposition
from dhelix.passes.communication.reduce_scatter_decomposition import ReduceScatterDecomposition
from dhelix.passes.communication.row_partition import RowPartition
from dhelix.passes.communication.strand_separation import StrandSeparation
from dhelix.passes.framework.manager import Pass
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule
from dhelix.passes.ordering.intra_batch import IntraBatch
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.passes.plans.plan import CollectivesSection, Plan
from dhelix.passes.plans.planned_order import PlannedOrder
from dhelix.passes.strands.activation_sharing import ActivationSharing
from dhelix.passes.strands.constant_sinking import ConstantSinking
from dhelix.passes.strands.gradients.gradient_accumulation import GradientAccumulation
from dhelix.passes.strands.gradients.replica_sums import ReplicaSums
from dhelix.passes.strands.slice_separation import SliceSeparation
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.passes.strands.strand_ends import StrandEnds
from dhelix.passes.strands.strand_lockstep import StrandLockstep
from dhelix.passes.strands.strand_skew import StrandSkew
from dhelix.runtime.step.options import StepOptions

type Listed = type[Any] | partial[Any]

STRANDS: tuple[Listed, ...] = (
    StrandSkew, StrandDuplication, StrandLockstep, GradientAccumulation, ActivationSharing, StrandEnds, ReplicaSums,
    ConstantSinking, SliceSeparation, StrandSeparation,
)  # fmt: skip
ROWS = partial(RowPartition, costs_decide=True)
COMMUNICATION: tuple[Listed, ...] = (
    partial(GradientReduction, costs_decide=True),
    ROWS,
    partial(ReduceScatterDecomposition, overlapped=True),
    partial(AllGatherDecomposition, overlapped=True),
    partial(PermuteDecomposition, overlapped=True),
)
LISTS: Mapping[str, tuple[Listed, ...]] = {
    "dp": (*STRANDS, *COMMUNICATION, StrandPairing),
    "list": (*STRANDS, *COMMUNICATION, CollectiveSchedule),
    "xla": STRANDS,
    "intra_batch": (ROWS, IntraBatch),
}
ONLY_WITH: Mapping[Listed, str] = {StrandSkew: "skew", StrandEnds: "skew"}
"""Passes that run only where this option of the step is not 0."""
_INSTEAD: Mapping[str, type[Any]] = {  # of collectives by kind
    "reduce-scatter": ReduceScatterDecomposition,
    "all-gather": AllGatherDecomposition,
    "collective-permute": PermuteDecomposition,
}


def default_passes(options: StepOptions | None = None, **target: Any) -> tuple[Pass, ...]:
    """The passes of a step's schedule, by default the default one's.

    Args:
      target: `model`, measured costs; `hardware`, whose roofline counts without a model; `memory_limit`, in bytes, in
        place of the step's.
    """
    options = options or StepOptions()
    return made(LISTS[options.schedule], options, **target)


def planned_passes(plan: Plan, memory_limit: int | None = None) -> tuple[Pass, ...]:
    """The passes that carry out a plan, which says what else is in its structure."""
    strands, chosen = strand_passes(plan.order.skew), alternatives(plan.collectives)
    return (*strands, *chosen, PlannedOrder(plan, memory_limit))


def strand_passes(skew: int = 0) -> tuple[Pass, ...]:
    """Two strands, `skew` layers apart, in the order that XLA gives them."""
    return made(STRANDS, StepOptions(skew=skew))


def alternatives(planned: CollectivesSection) -> tuple[Pass, ...]:
    """What a plan says to stand in place of collectives: the passes that make it, wherever it can be."""
    reduction = (GradientReduction(),) if planned.reduced else ()
    partition = (RowPartition(parts=planned.row_parts),) if planned.row_parts else ()
    kinds, only = {key.kind for key in planned.decomposed}, planned.decomposed
    return *reduction, *partition, *(one(only=only) for kind, one in _INSTEAD.items() if kind in kinds)


def made(listed: Iterable[Listed], options: StepOptions, **others: Any) -> tuple[Pass, ...]:
    """Passes of a list, each with those of the step's options that it has a field for, and of `others`."""
    said = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)} | others
    found: list[Pass] = []
    for one in listed:
        if one in ONLY_WITH and not said[ONLY_WITH[one]]:
            continue
        kind: Any = one.func if isinstance(one, partial) else one
        fixed = one.keywords if isinstance(one, partial) else {}
        names = (field.name for field in dataclasses.fields(kind) if field.name not in fixed)
        found.append(one(**{name: said[name] for name in names if name in said}))
    return tuple(found)
