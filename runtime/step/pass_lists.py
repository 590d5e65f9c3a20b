"""Lists the passes that a step runs: one list for each schedule, and one for plans.

    schedule            strands                          order of operators on GPUs
    dp, the default     backward overlapping forward     pairing by dynamic programming (DHelix section 4.2)
    list                backward overlapping forward     list scheduling of collectives
    xla                 backward overlapping forward     XLA's own
    intra_batch         none                             the search of dp inside one micro-batch (MegaScale)
    a plan              backward overlapping forward     the plan's

The lists hold classes of passes, with their fixed options. A pass gets its other options by name. For example, its
field `max_in_flight` takes the step's `max_in_flight`. Its fields `model` and `hardware` come from the step's target.
So a new option of a step needs no change in this module, if the pass has a field of the same name.

Reordering alone cannot hide all communication inside one micro-batch. Partitioned matrix products hide more. So the
default of `collective_matmul` is "auto" for `intra_batch`, and "off" for the other schedules
(`options.StepOptions.matmuls`).
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
from dhelix.passes.communication.stream_assignment import StreamAssignment
from dhelix.passes.framework.manager import Pass
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule
from dhelix.passes.ordering.intra_batch import IntraBatch
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.passes.plans.plan import CollectivesSection, Plan
from dhelix.passes.plans.planned_order import PlannedOrder
from dhelix.passes.sharding.states.parameter_gathering import ParameterGathering
from dhelix.passes.sharding.states.parameter_prefetch import ParameterPrefetch
from dhelix.passes.strands.activation_sharing import ActivationSharing
from dhelix.passes.strands.constant_sinking import ConstantSinking
from dhelix.passes.strands.gradients.gradient_accumulation import GradientAccumulation
from dhelix.passes.strands.gradients.replica_sums import ReplicaSums
from dhelix.passes.strands.slice_separation import SliceSeparation
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.passes.strands.strand_ends import StrandEnds
from dhelix.passes.strands.strand_lockstep import StrandLockstep
from dhelix.passes.strands.strand_skew import StrandSkew
from dhelix.profiles.hardware import H200, Hardware
from dhelix.runtime.step.options import StepOptions

type Listed = type[Any] | partial[Any]

STRANDS: tuple[Listed, ...] = (
    StrandSkew, StrandDuplication, StrandLockstep, GradientAccumulation, ActivationSharing, StrandEnds, ReplicaSums,
    ConstantSinking, SliceSeparation, ParameterGathering, ParameterPrefetch, StrandSeparation,
)  # fmt: skip
ROWS = partial(RowPartition, costs_decide=True)
GATHERING, PREFETCH = partial(ParameterGathering), partial(ParameterPrefetch)
COMMUNICATION: tuple[Listed, ...] = (
    partial(GradientReduction, costs_decide=True),
    ROWS,
    partial(ReduceScatterDecomposition, overlapped=True),
    partial(AllGatherDecomposition, overlapped=True),
    partial(PermuteDecomposition, overlapped=True),
    StreamAssignment,
)
LISTS: Mapping[str, tuple[Listed, ...]] = {
    "dp": (*STRANDS, *COMMUNICATION, StrandPairing),
    "list": (*STRANDS, *COMMUNICATION, CollectiveSchedule),
    "xla": STRANDS,
    "intra_batch": (GATHERING, PREFETCH, ROWS, StreamAssignment, IntraBatch),
}
ONLY_WITH: Mapping[Listed, str] = {StrandSkew: "skew", StrandEnds: "skew", GATHERING: "sharding", PREFETCH: "sharding"}
"""Maps a pass to an option of the step. The pass runs only if this option is given and not 0."""
_INSTEAD: Mapping[str, type[Any]] = {  # kind of collective -> the pass that decomposes collectives of this kind
    "reduce-scatter": ReduceScatterDecomposition,
    "all-gather": AllGatherDecomposition,
    "collective-permute": PermuteDecomposition,
}


def default_passes(options: StepOptions | None = None, **target: Any) -> tuple[Pass, ...]:
    """Returns the passes of a step's schedule.

    Args:
      options: options of the step; default: `StepOptions()`.
      **target: values for fields of passes. `model` holds measured costs. `hardware` is the GPU and its links; without
        a model, costs come from its roofline. `memory_limit` (bytes) overrides the limit in `options`.
    """
    options = options or StepOptions()
    return made(LISTS[options.schedule], options, **target)


def planned_passes(plan: Plan, memory_limit: int | None = None, hardware: Hardware = H200) -> tuple[Pass, ...]:
    """Returns the passes that carry out a plan.

    The passes make strands, replace collectives and order operators as the plan says. They also assign streams.
    """
    strands, chosen = strand_passes(plan.order.skew), alternatives(plan.collectives)
    return (*strands, *chosen, StreamAssignment(hardware), PlannedOrder(plan, memory_limit))


def strand_passes(skew: int = 0) -> tuple[Pass, ...]:
    """Returns the passes that make two strands, `skew` layers apart. They leave the order to XLA."""
    return made(STRANDS, StepOptions(skew=skew))


def alternatives(planned: CollectivesSection) -> tuple[Pass, ...]:
    """Returns passes that replace and split collectives as a plan says. They leave alone what cannot be replaced."""
    reduction = (GradientReduction(),) if planned.reduced else ()
    partition = (RowPartition(parts=planned.row_parts, only=planned.parted or None),) if planned.row_parts else ()
    kinds, only = {key.kind for key in planned.decomposed}, planned.decomposed
    return *reduction, *partition, *(one(only=only) for kind, one in _INSTEAD.items() if kind in kinds)


def made(listed: Iterable[Listed], options: StepOptions, **others: Any) -> tuple[Pass, ...]:
    """Instantiates the passes of a list. The fields of a pass get the options and `others` of the same names."""
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
