"""Which passes a step goes through, by the names that `strand_interleave(schedule=...)` takes.

    schedule            strands                     order of operators on GPUs
    dp, the default     backward beside forward     pairing by dynamic programming (DHelix section 4.2)
    list                backward beside forward     list scheduling of collectives
    xla                 backward beside forward     XLA's own
    round_robin         backward beside forward     operators of both in turn (Wavelet+), a baseline
    forward_forward     forward beside forward      as dp, a baseline; backward passes run alone
    backward_backward   backward beside backward    as dp, a baseline; forward passes run alone
    intra_batch         none                        the search of dp inside one micro-batch, a baseline (MegaScale)
    a plan              backward beside forward     the plan's

What order cannot hide inside one micro-batch, partitioned matrix products can: so `intra_batch` comes with
collective_matmul="auto" unless the user says otherwise, and the others without.

Orders rest on measured costs where there are any: `Choice.manager` looks up the profile of the GPUs that a program is
lowered for, under the link and launch setting that this process has (`runtime/processes/launch_settings.py`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.communication import exchange
from dhelix.passes.communication.all_gather_decomposition import AllGatherDecomposition
from dhelix.passes.communication.collective_matmul.pattern import Placed
from dhelix.passes.communication.gradient_reduction import GradientReduction
from dhelix.passes.communication.permute_decomposition import PermuteDecomposition
from dhelix.passes.communication.reduce_scatter_decomposition import ReduceScatterDecomposition
from dhelix.passes.communication.row_partition import RowPartition
from dhelix.passes.communication.strand_separation import StrandSeparation
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.framework.manager import Pass, PassManager, Stage, say_once
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule, list_order
from dhelix.passes.ordering.exclusive_kernels import ExclusiveKernels
from dhelix.passes.ordering.reference_orders import IntraBatch, RoundRobin
from dhelix.passes.ordering.strand_pairing import StrandPairing, pairing_order
from dhelix.passes.plans import pairing_plan_json
from dhelix.passes.plans.pairing_plan import PairingPlan
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
from dhelix.profiles.collective_matmul.sites import Form
from dhelix.profiles.estimates import alike
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import H200, Hardware, gpu_name
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import Profile, Provenance
from dhelix.runtime.processes import launch_settings
from dhelix.runtime.processes.nodes import gpus_per_node
from dhelix.runtime.step.collective_matmul_choice import Weighing
from dhelix.runtime.step.collective_matmul_pass import OFF, collective_matmul_passes, times_on
from dhelix.runtime.step.option_types import DEFAULT, LIMITED, SCHEDULES, SKEWED
from dhelix.runtime.step.plain_step import PlainStep
from dhelix.runtime.step.target import gpu_of, hardware_of, unlike

AUTO = "auto"


def default_passes(
    schedule: str = DEFAULT,
    model: CostModel | None = None,
    memory_limit: int | None = None,
    hardware: Hardware = H200,
    max_in_flight: int | None = None,
    skew: int = 0,
) -> tuple[Pass, ...]:
    """The passes that `strand_interleave` runs.

    Args:
      schedule: one of SCHEDULES.
      model: measured costs; None: the roofline's.
      memory_limit: bytes that the step may need beside its arguments; None: what XLA's order needs, and 3 %.
      hardware: whose roofline counts without a model.
      max_in_flight: collectives of one lane between their start and their done; None: as many as are fastest.
      skew: layers that strands are apart, where one goes forward beside the other's backward.
    """
    check_schedule(schedule)
    limits: dict[str, Any] = {"memory_limit": memory_limit, "model": model, "max_in_flight": max_in_flight}
    pairing = StrandPairing(hardware, **limits)
    apart = _strands(skew=skew)
    partition = RowPartition(model, costs_decide=True)
    reduction = GradientReduction(model, costs_decide=True)
    strands = (*apart, reduction, partition, *decompositions(exchange.KINDS, model=model, overlapped=True))
    passes: dict[str, tuple[Pass, ...]] = {
        "dp": (*strands, pairing),
        "list": (*strands, CollectiveSchedule(hardware, **limits)),
        "xla": apart,
        "round_robin": (*apart, RoundRobin(hardware, **limits)),
        "forward_forward": (*_strands("forward-forward"), pairing),
        "backward_backward": (*_strands("backward-backward"), pairing),
        "intra_batch": (partition, IntraBatch(hardware, **limits)),
    }
    return passes[schedule]


def _strands(pairing: str = "forward-backward", skew: int = 0) -> tuple[Pass, ...]:
    """Two strands of which what `pairing` says runs together (`strand_duplication.PAIRINGS`), `skew` layers apart."""
    before, behind = ((StrandSkew(skew),), (StrandEnds(),)) if skew else ((), ())
    structure = StrandDuplication(pairing=pairing), StrandLockstep(), GradientAccumulation(), ActivationSharing()
    return *before, *structure, *behind, ReplicaSums(), ConstantSinking(), SliceSeparation(), StrandSeparation()


def planned_passes(plan: PairingPlan, memory_limit: int | None = None) -> tuple[Pass, ...]:
    """The passes that carry out a plan."""
    target = plan.target
    chosen = alternatives(target.decomposed, target.row_parts, target.reduced)
    return (*_strands(skew=target.skew), *chosen, PlannedOrder(plan, memory_limit))


def alternatives(decomposed: Collection[CollectiveKey], row_parts: int, reduced: int = 0) -> tuple[Pass, ...]:
    """What a plan may say to stand in place of collectives: the passes that make it, wherever it can be."""
    reduction = (GradientReduction(),) if reduced else ()
    partition = (RowPartition(parts=row_parts),) if row_parts else ()
    only = tuple(decomposed)
    return *reduction, *partition, *decompositions({key.kind for key in only}, only=only)


def decompositions(kinds: Collection[str], **options: Any) -> tuple[Pass, ...]:
    """Other collectives in place of large ones of these kinds; options as of `exchange.Decomposition`."""
    known: dict[str, Pass] = {
        "reduce-scatter": ReduceScatterDecomposition(**options),
        "all-gather": AllGatherDecomposition(**options),
        "collective-permute": PermuteDecomposition(**options),
    }
    return tuple(one for kind, one in known.items() if kind in kinds)


def check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise DhelixError(f"schedule={schedule!r} means nothing; take one of {', '.join(SCHEDULES)}")


def collective_matmul_of(asked: str | Form | None, schedule: str, plan: object, passes: object) -> str | Form:
    """What is `asked` for collective matmuls, or with None what `schedule` comes with, unless plan or passes replace
    it."""
    if asked is not None:
        return asked
    return AUTO if schedule == "intra_batch" and plan is None and passes is None else OFF


@dataclass(frozen=True)
class Choice:
    """What the user chose; the passes follow from it and from the program's GPUs.

    Attributes are options of `strand_interleave`, and those of XLA that the step is jitted with; and `paired`, what
    `weighed` adds, and `step`, what tells a step from others in the log.
    """

    schedule: str = DEFAULT
    profile: str | Path | Profile | None = AUTO
    plan: PairingPlan | None = None
    memory_limit: int | None = None
    max_in_flight: int | None = None
    passes: tuple[Pass, ...] | None = None
    disable: Collection[str] = ()
    strict: bool = False
    dump_to: str | Path | None = None
    compiler_options: Mapping[str, Any] | None = None
    pipelined: bool = False
    collective_matmul: str | Form = OFF
    paired: tuple[Placed, ...] = ()
    skew: int = 0
    step: str = ""

    @classmethod
    def of(
        cls,
        schedule: str,
        profile: str | Path | Profile | None,
        plan: str | Path | PairingPlan | None,
        memory_limit: int | None,
        max_in_flight: int | None,
        passes: Sequence[Pass] | None,
        **others: Any,
    ) -> Choice:
        """Checked. Raises DhelixError, also for a plan or a profile that cannot be read."""
        check_schedule(schedule)
        _check_names(passes, others.get("disable", ()))
        if plan is not None and not isinstance(plan, PairingPlan):
            plan = pairing_plan_json.load(plan)
        if profile is not None and profile != AUTO and not isinstance(profile, Profile):
            profile = storage.load(profile)
        if memory_limit is not None and (not isinstance(memory_limit, int) or memory_limit < 0):
            raise DhelixError(f"memory_limit={memory_limit!r}: give bytes beside the arguments, or None for 3 % more")
        if passes is not None and plan is not None:
            raise DhelixError("passes= is all that runs, so plan= has no effect: leave out one, or pass PlannedOrder")
        if memory_limit is not None and passes is not None:
            raise DhelixError("passes= is all that runs, so memory_limit= has no effect: give it to a pass of them")
        if others.get("collective_matmul", OFF) != OFF and passes is not None:
            raise DhelixError("passes= is all that runs, so collective_matmul= has no effect: add its passes")
        if memory_limit is not None and plan is None and schedule == "xla":
            raise DhelixError("schedule='xla' keeps to no memory_limit: leave it out, or take another schedule")
        _check_in_flight(max_in_flight, schedule, plan, passes)
        _check_skew(others.get("skew", 0), schedule, plan, passes, others.get("pipelined", False))
        found = None if passes is None else tuple(passes)
        return cls(schedule, profile, plan, memory_limit, max_in_flight, found, **others)

    def limited(self, lowered: jax.stages.Lowered, plain: PlainStep | None) -> Choice:
        """With the memory that a program may need: what the user says, else 3 % more than the program needs as it is.

        A plan may need what it was allowed when it was made. Not limited are baselines, passes of the user's own and
        devices other than GPUs, nor is a program whose memory is not known before it is compiled.

        Args:
          plain: the step before any pass; None on other devices than GPUs.
        """
        if plain is None:
            if self.memory_limit is not None:
                line = "memory_limit= bounds what orders take, and orders are made for GPUs: here it limits nothing"
                say_once(line, (line,))
            return replace(self, memory_limit=None)
        limited = self.passes is None and (self.plan is not None or self.schedule in LIMITED)
        if self.memory_limit is not None or not limited or plain.known is None:
            return self
        planned = 0 if self.plan is None else self.plan.target.memory_limit
        return replace(self, memory_limit=max(plain.known[0].allowed(), planned))

    def plain_step(self, lowered: jax.stages.Lowered, program: bytes) -> PlainStep | None:
        """What the step, which is `program` as HLO, is compared with; None on devices other than GPUs."""
        if gpu_of(lowered) is None:
            return None
        return PlainStep(lowered, program, lambda: self.costs(lowered), self.compiler_options)

    def costs(self, lowered: jax.stages.Lowered) -> Costs:
        """What operators cost on the GPUs of a program."""
        model = self.model(lowered)
        return Costs(hardware_of(lowered)) if model is None else model.costs()

    def weighed(self, lowered: jax.stages.Lowered) -> Choice:
        """With the sites whose collectives are better paired with the other strand's compute than replaced: by what the
        step is predicted to take. Only orders that were searched by measured costs say so."""
        if self.collective_matmul != AUTO or self.passes is not None or self.plan is not None:
            return self
        model = self.model(lowered) if self.schedule in LIMITED else None
        if model is None:
            return self
        quiet = replace(self, strict=False, dump_to=None)
        order = pairing_order if self.schedule == "dp" else list_order
        weighing = Weighing(
            lowered, lambda paired: replace(quiet, paired=paired).manager(lowered), model, order,
            self.memory_limit, self.max_in_flight,
        )  # fmt: skip
        try:
            found = weighing.weighed()
        except Exception as error:  # what only predicts must not stop a job
            if self.strict:
                raise
            say_once(f"collective matmuls are taken by what they save alone: {error}", ("weighed",))
            return self
        return self if found is None else replace(self, paired=found.paired)

    def without_plan(self) -> Choice:
        """The same, with both strands in XLA's order in place of a plan's."""
        known = [one.name for one in default_passes("xla")]
        disabled = (self.disable,) if isinstance(self.disable, str) else self.disable
        return replace(self, plan=None, schedule="xla", disable=tuple(n for n in known if n in disabled))

    def manager(self, lowered: jax.stages.Lowered | None = None) -> PassManager:
        """The passes for a program; without one as for CPUs, where no costs are needed.

        Raises DhelixError where a profile that was asked for is not of this launch setting.
        """
        kind = None if lowered is None else gpu_of(lowered)
        if self.passes is not None:
            passes: Sequence[Pass] = self.passes
        elif self.plan is not None:
            passes = planned_passes(self.plan, self.memory_limit)
            if kind is not None:
                self._compare_with_plan(self.plan, kind)
            elif lowered is not None:
                line = "a plan orders what GPUs run: on other devices only its structure counts (skew, reduced layers)"
                say_once(line, (line,))
        else:
            limits = {"max_in_flight": self.max_in_flight, "skew": self.skew}
            passes = default_passes(self.schedule, None, self.memory_limit, **limits)
            if kind is not None and self.schedule != "xla":
                assert lowered is not None  # there is a kind
                model = self.model(lowered)
                passes = default_passes(self.schedule, model, self.memory_limit, hardware_of(lowered), **limits)
        if self.pipelined and self.passes is None:  # the executor has made the strands
            passes = [one for one in passes if one.stage is not Stage.LOWERED]
        if self.passes is None:
            passes = (*self._collective_matmuls(lowered), *passes)
        return PassManager(passes, self.disable, self.strict, self.dump_to, self.step)

    def _collective_matmuls(self, lowered: jax.stages.Lowered | None) -> tuple[Pass, ...]:
        """First of all, since other passes change collectives and orders. The guard is for kernels that the user calls,
        too."""
        devices = [] if lowered is None else jax_compat.devices(lowered)
        planned = self.plan is not None and self.collective_matmul == AUTO  # its collectives are in the plan
        form = OFF if planned else self.collective_matmul
        found = collective_matmul_passes(devices, form, options=self.compiler_options, paired=self.paired)
        return found or (ExclusiveKernels(),)

    def model(self, lowered: jax.stages.Lowered) -> CostModel | None:
        """Measured costs on the GPUs of a program, as this process is started; None where there are none."""
        kind = gpu_of(lowered)
        if self.profile is None or kind is None:
            return None
        found = self.profile
        if isinstance(found, Profile):
            if other := unlike(found.hardware, found.link, kind):
                say_once(f"costs are those of {other}", (other,))
        else:
            gpu, link = gpu_name(kind), launch_settings.link_of(os.environ)
            try:
                found = storage.find(gpu, link)
            except DhelixError as error:  # a file that nobody named must not stop a job
                say_once(f"costs are a roofline's: {error}", ("profile",))
                return None
            if found is None:
                what = f"{gpu} with link {link}"
                say_once(f"nothing was measured on {what}: costs are a roofline's; run `dhelix profile`", (what,))
                return None
        setting, line = launch_settings.nearest(found.sections, os.environ, self.compiler_options)
        if setting is None and isinstance(self.profile, Profile):  # it was asked for, and is of no use
            setting = launch_settings.setting_of(os.environ, self.compiler_options).name
        elif line:
            say_once(f"{found.hardware} with link {found.link}: {line}", ("launch setting",))
        if setting is None:
            return None
        here = Provenance("", 0, jax=jax.__version__)
        for line in filter(None, (alike.told(found, [setting]), *storage.differences(found, here))):
            say_once(line, (line,))
        return CostModel(found, setting, times_on(kind), gpus_per_node(jax_compat.devices(lowered)))

    def _compare_with_plan(self, plan: PairingPlan, kind: str) -> None:
        """Says how the process should have been started, and what else is not what the plan was made for."""
        told = [launch_settings.difference(plan.target, options=self.compiler_options)]
        if other := unlike(plan.target.hardware, plan.target.link, kind):
            told.append(f"the plan is for {other}")
        for line in filter(None, told):
            say_once(line, (line,))


def _check_names(passes: object, disable: object) -> None:
    """What is a list of passes, and of names of them."""
    if passes is not None and not (
        isinstance(passes, Sequence) and all(hasattr(one, "stage") and hasattr(one, "run") for one in passes)
    ):
        raise DhelixError(f"passes={passes!r}: give a list of passes, each with name, stage and run()")
    listed = isinstance(disable, Collection) and all(isinstance(name, str) for name in disable)
    if not listed:
        raise DhelixError(f"disable={disable!r}: give names of passes, such as ('strand-pairing',)")


def _check_in_flight(most: int | None, schedule: str, plan: object, passes: object) -> None:
    if most is None:
        return
    if not isinstance(most, int) or most < 1:
        raise DhelixError(f"max_in_flight={most!r}: give how many collectives, 1 or more, or None for what is fastest")
    if passes is not None:
        raise DhelixError("passes= is all that runs, so max_in_flight= has no effect: give it to a pass of them")
    if plan is not None:
        raise DhelixError("a plan says what is in flight: leave out max_in_flight=, or plan with --max_in_flight")
    if schedule == "xla":
        raise DhelixError("schedule='xla' keeps to no max_in_flight: leave it out, or take another schedule")


def _check_skew(skew: int, schedule: str, plan: object, passes: object, pipelined: bool) -> None:
    if not isinstance(skew, int) or skew < 0:
        raise DhelixError(f"skew={skew!r}: give how many layers the strands are apart, 0 or more")
    if not skew:
        return
    if passes is not None:
        raise DhelixError("passes= is all that runs, so skew= has no effect: add StrandSkew and StrandEnds to them")
    if plan is not None:
        raise DhelixError("a plan says how far strands are apart: leave out skew=, or plan with --skew")
    if pipelined:
        raise DhelixError("a pipeline pairs micro-batches by its own schedule: leave out skew=")
    if schedule not in SKEWED:
        raise DhelixError(f"schedule={schedule!r} keeps no strands apart: leave out skew=, or take {', '.join(SKEWED)}")
