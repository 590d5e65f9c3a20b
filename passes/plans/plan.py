"""A plan as data: the decisions about how a step runs, in sections.

    plan = plan_files.load("plan.json")  # a file that `dhelix plan --out plan.json` has written; people may edit it
    strand_interleave(plan=plan)         # decorates a step, which then runs as the plan says

    section        says                                                         used by
    target         the GPUs and the launch setting for which it was made        `Target.compare`, which logs differences
    collectives    which collectives are replaced or split                      passes in `passes/communication/`
    order          the order of operators, and limits on memory and overlap     `planned_order.py`
    sharding       how model states are sharded over data-parallel devices      `runtime/sharding/state_plan.py`
    tuning         how NCCL runs each collective                                `runtime/tuning/in_effect.py`

The order section holds bodies: the computations whose order was decided. A body is a sequence of segments. A segment
holds the collectives that are launched together, and the operators that run with them until the next collective is
launched (DHelix figure 10). The launch order is the order of the segments, and of the operators in a segment. Nothing
else in a plan decides the order of operators.

Operators have readable names, unique in their body, such as `beta all-gather 2`. A table maps each name to an operator
of the program: to its *operator key*, and to its number among the operators with this key (`plan_operators.py`). XLA's
instruction names change with versions and with unrelated parts of the program. Keys do not change. A body's fingerprint
is computed from the keys of its collectives, matrix products and attention. So a plan for 4 layers and 4 micro-batches
also fits 40 layers and 16 micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dhelix.errors import DhelixError
from dhelix.passes.sharding.sharding_plan import ShardingPlan
from dhelix.passes.tuning.collective_settings import CollectiveSettings
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import SETTINGS, LaunchSetting

FINALLY = "finally"


class PlanError(DhelixError):
    """A file is not a plan, or a plan cannot be carried out."""


@dataclass(frozen=True)
class PlanOperator:
    """An operator of a body.

    Attributes:
      name: readable name, such as `alpha attention backward`; unique in its body.
      key: the operator key as text. For control flow, the opcode and a digest of what it runs.
      occurrence: number among the body's operators with this key, from 1.
    """

    name: str
    key: str
    occurrence: int


@dataclass(frozen=True)
class PlanSegment:
    """Operators that run together.

    Attributes:
      run: names of operators, in launch order.
      predicted_us: predicted time from the start of this segment to the start of the next one. Collectives of this
        segment may still be in flight then.
      measured_us: the same time, measured in a trace; None if there is no trace.
      guessed: fraction of the segment's time that is a guess, because nothing similar was measured. It is a fraction of
        the sum of the operators' times alone.
    """

    run: tuple[str, ...]
    predicted_us: float = 0.0
    measured_us: float | None = None
    guessed: float = 0.0


@dataclass(frozen=True)
class PlanBody:
    """The order of one computation.

    Attributes:
      name: readable name.
      fingerprint: digest of the computation's collectives, products and attentions. It identifies the computation in a
        program.
      runs: how often a step runs the computation, in the program for which the plan was made.
      operators: the operators that the segments name, each once.
      small: short instructions that are not operators, as groups. A group has the name of the operator before which its
        instructions run (`FINALLY`: after all operators), and their keys and occurrences. An instruction that is not
        ready at this place runs as soon as it is ready. So instructions move with operators.
    """

    name: str
    fingerprint: str
    runs: int
    operators: tuple[PlanOperator, ...]
    segments: tuple[PlanSegment, ...]
    small: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        """Names of all operators in launch order."""
        return tuple(name for segment in self.segments for name in segment.run)

    @property
    def predicted_us(self) -> float:
        """Predicted time of one execution, in microseconds."""
        return sum(segment.predicted_us for segment in self.segments)

    @property
    def measured_us(self) -> float | None:
        """Measured time of one execution, in microseconds; None if a segment was not measured."""
        taken = [segment.measured_us for segment in self.segments if segment.measured_us is not None]
        return sum(taken) if taken and len(taken) == len(self.segments) else None


@dataclass(frozen=True)
class PlanTarget:
    """The machine that a plan was made for, and the launch setting that the process needs.

    Attributes:
      hardware, link, setting: hardware, link and launch setting of the profile with which the plan was made.
      implementation: the implementation of collectives, one of `profiles.keys.IMPLEMENTATIONS`.
      environment, xla_flags: the environment variables and XLA flags of the setting.
      gpus_per_node: number of GPUs in a node; 0 means the usual number for this hardware.
    """

    hardware: str = "H200"
    link: str = "nvlink"
    setting: str = "default"
    implementation: str = "nccl"
    environment: tuple[tuple[str, str], ...] = ()
    xla_flags: tuple[str, ...] = ()
    gpus_per_node: int = 0

    @classmethod
    def of(cls, hardware: str, link: str, setting: str, gpus_per_node: int = 0) -> PlanTarget:
        """A target with the launch setting `setting`, one of `profile.SETTINGS`."""
        known: LaunchSetting = SETTINGS[setting]
        environment = tuple(sorted(known.environment.items()))
        return cls(hardware, link, setting, known.implementation, environment, known.training_flags, gpus_per_node)


@dataclass(frozen=True)
class CollectivesSection:
    """Which collectives are replaced or split.

    Attributes:
      decomposed: collectives that are replaced by collectives of another kind (`exchange.INSTEAD`).
      row_parts: number of parts into which each chain from an all-gather to a reduce-scatter is split, in computations
        in which only one strand runs (`passes/communication/row_partition.py`). With 0, chains stay whole.
      reduced: 1 if gradients are reduced layer by layer (`passes/communication/gradient_reduction.py`), 0 if they are
        reduced as in the program.
      parted: all-gathers whose chains are split, if `row_parts` is given; () means all.
    """

    decomposed: tuple[CollectiveKey, ...] = ()
    row_parts: int = 0
    reduced: int = 0
    parted: tuple[CollectiveKey, ...] = ()


@dataclass(frozen=True)
class OrderSection:
    """The order of operators and its limits.

    Attributes:
      bodies: computations whose order was decided.
      skew: number of layers by which the strands are apart.
      max_in_flight: largest number of collectives in flight per lane; 0 for no limit.
      memory_limit: memory that the order may need, in bytes per GPU, arguments included. The memory of XLA's order plus
        3 % (`MEMORY_SLACK`) is always allowed, so 0 means only this. The user's `memory_limit` replaces both limits.
    """

    bodies: tuple[PlanBody, ...] = ()
    skew: int = 0
    max_in_flight: int = 0
    memory_limit: int = 0


@dataclass(frozen=True)
class Prediction:
    """The predicted times of one step, in microseconds.

    Attributes:
      makespan_us: time of the whole step.
      compute_us, communication_us: time in which compute runs, and time in which communication runs.
      hidden_fraction: fraction of the communication time that compute hides.
      guessed_fraction: fraction of the operators' times alone that is a guess, because nothing similar was measured.
      guessed_overlap_fraction: fraction of the overlapped time for which no measured pair says how much collective and
        compute slow each other down (`timeline.guessed_overlap`).
    """

    makespan_us: float = 0.0
    compute_us: float = 0.0
    communication_us: float = 0.0
    hidden_fraction: float = 0.0
    guessed_fraction: float = 0.0
    guessed_overlap_fraction: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A plan for one program. `program` is a readable name; the bodies' fingerprints decide which programs it fits.

    `sharding` and `tuning` are None if the plan says nothing about them, as in files of earlier versions.
    """

    program: str
    target: PlanTarget = PlanTarget()
    collectives: CollectivesSection = CollectivesSection()
    order: OrderSection = OrderSection()
    predicted: Prediction = Prediction()
    sharding: ShardingPlan | None = None
    tuning: CollectiveSettings | None = None

    @property
    def leaves_program(self) -> bool:
        """Whether the plan only shards states or sets collectives, as those of `dhelix shard` and `dhelix tune`."""
        other = self.sharding is not None or self.tuning is not None
        return other and (self.collectives, self.order) == (CollectivesSection(), OrderSection())

    @property
    def bodies(self) -> tuple[PlanBody, ...]:
        """The bodies of the order section."""
        return self.order.bodies

    def with_bodies(self, bodies: Iterable[PlanBody]) -> Plan:
        """This plan with other bodies."""
        return replace(self, order=replace(self.order, bodies=tuple(bodies)))

    def body(self, fingerprint: str) -> PlanBody:
        """The body with this fingerprint. Raises KeyError if there is none."""
        for body in self.bodies:
            if body.fingerprint == fingerprint:
                return body
        raise KeyError(fingerprint)

    def with_body(self, changed: PlanBody) -> Plan:
        """This plan with `changed` in place of the body with the same fingerprint."""
        return self.with_bodies(changed if b.fingerprint == changed.fingerprint else b for b in self.bodies)
