"""A plan as data: how a step is to run, as it was decided before, in sections.

    plan = plan_files.load("plan.json")  # `dhelix plan --out plan.json` writes one; people read and edit it
    strand_interleave(plan=plan)         # runs it

    section        says                                                         carried out by
    target         GPUs, launch setting: what it was decided for                checked where the step is lowered
    collectives    what stands in place of collectives                          passes of `communication/`
    order          what runs with what, in which order, within which limits     planned_order.py

*The order* holds the computations whose order was decided, its bodies. A body is a row of segments: the collectives
that are launched together and the operators that run with them, until the next collective is launched (DHelix figure
10). The order of operators in a segment, and of segments, is the order of launch; nothing else in a plan decides about
order.

Operators have names for people, unique in their body, such as `beta all-gather 2`. A table says which operator of the
program that is: the second one with a certain *operator key* (`plan_operators.py`). XLA's names of instructions
change with versions and with unrelated parts of the program; keys do not. A body's fingerprint is that of the keys of
its collectives, matrix products and attention: so a plan of 4 layers and 4 micro-batches fits 40 layers and 16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dhelix.errors import DhelixError
from dhelix.profiles.keys import CollectiveKey
from dhelix.profiles.profile import SETTINGS, LaunchSetting

FINALLY = "finally"


class PlanError(DhelixError):
    """A file is no plan, or a plan cannot be carried out."""


@dataclass(frozen=True)
class PlanOperator:
    """An operator of a body.

    Attributes:
      name: for people, such as `alpha attention backward`; unique in its body.
      key: as text; control flow, which has none in a profile, is called by its opcode and what is inside.
      occurrence: which of the operators with this key, from 1.
    """

    name: str
    key: str
    occurrence: int


@dataclass(frozen=True)
class PlanSegment:
    """What runs together.

    Attributes:
      run: names of operators, in the order of their launch.
      predicted_us: until the next segment begins; collectives may go on beneath that.
      measured_us: the same in a trace, once there is one.
      guessed: share of the operators' time alone that no measurement stands behind.
    """

    run: tuple[str, ...]
    predicted_us: float = 0.0
    measured_us: float | None = None
    guessed: float = 0.0


@dataclass(frozen=True)
class PlanBody:
    """One computation.

    Attributes:
      name: for people.
      fingerprint: of what it runs; finds it in a program.
      runs: how often a step runs it, in the program that the plan was made for.
      operators: those that segments name, each once.
      small: what takes microseconds and is no operator: by the operator that it runs before (`FINALLY`: after all), its
        keys and occurrences. What is not ready by then waits until it is, so it follows where operators are moved to.
    """

    name: str
    fingerprint: str
    runs: int
    operators: tuple[PlanOperator, ...]
    segments: tuple[PlanSegment, ...]
    small: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        """Names of all operators in the order of their launch."""
        return tuple(name for segment in self.segments for name in segment.run)

    @property
    def predicted_us(self) -> float:
        return sum(segment.predicted_us for segment in self.segments)

    @property
    def measured_us(self) -> float | None:
        """None where a segment was not measured."""
        taken = [segment.measured_us for segment in self.segments if segment.measured_us is not None]
        return sum(taken) if taken and len(taken) == len(self.segments) else None


@dataclass(frozen=True)
class PlanTarget:
    """What a plan was made for, and how the process must be started to get it.

    Attributes:
      hardware, link, setting: of the profile that it rests on.
      implementation: how collectives run (`profiles.keys.IMPLEMENTATIONS`).
      environment, xla_flags: the setting, spelled out.
      gpus_per_node: 0: as many as nodes of such GPUs usually have.
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
        """Under one of `profile.SETTINGS`."""
        known: LaunchSetting = SETTINGS[setting]
        environment = tuple(sorted(known.environment.items()))
        return cls(hardware, link, setting, known.implementation, environment, known.training_flags, gpus_per_node)


@dataclass(frozen=True)
class CollectivesSection:
    """What stands in place of collectives.

    Attributes:
      decomposed: collectives that others take the place of (`exchange.INSTEAD`).
      row_parts: parts that chains from a gather to a scatter are computed in where one strand runs
        (`passes/communication/row_partition.py`); 0: whole.
      reduced: 1: gradients are reduced layer by layer (`passes/communication/gradient_reduction.py`); 0: as the program
        has it.
    """

    decomposed: tuple[CollectiveKey, ...] = ()
    row_parts: int = 0
    reduced: int = 0


@dataclass(frozen=True)
class OrderSection:
    """What runs with what.

    Attributes:
      bodies: computations whose order was decided.
      skew: layers that the strands are apart.
      max_in_flight: collectives of one lane that may be between their start and their end; 0: as many as are fastest.
      memory_limit: bytes on a GPU that were allowed, arguments and all; 0: what XLA's order needs, and 3 %.
    """

    bodies: tuple[PlanBody, ...] = ()
    skew: int = 0
    max_in_flight: int = 0
    memory_limit: int = 0


@dataclass(frozen=True)
class Prediction:
    """Of one step. `hidden_fraction`: share of the communication, as it runs, that lies under compute;
    `guessed_fraction`: share of all operators' time alone that no measurement stands behind;
    `guessed_overlap_fraction`: share of the time in which collectives run beside compute for which none says how much
    they slow each other down (`timeline.guessed_overlap`)."""

    makespan_us: float = 0.0
    compute_us: float = 0.0
    communication_us: float = 0.0
    hidden_fraction: float = 0.0
    guessed_fraction: float = 0.0
    guessed_overlap_fraction: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A plan for one program. `program` is for people; what it fits is said by the bodies' fingerprints."""

    program: str
    target: PlanTarget = PlanTarget()
    collectives: CollectivesSection = CollectivesSection()
    order: OrderSection = OrderSection()
    predicted: Prediction = Prediction()

    @property
    def bodies(self) -> tuple[PlanBody, ...]:
        return self.order.bodies

    def with_bodies(self, bodies: Iterable[PlanBody]) -> Plan:
        return replace(self, order=replace(self.order, bodies=tuple(bodies)))

    def body(self, fingerprint: str) -> PlanBody:
        """Raises KeyError if there is none."""
        for body in self.bodies:
            if body.fingerprint == fingerprint:
                return body
        raise KeyError(fingerprint)

    def with_body(self, changed: PlanBody) -> Plan:
        """With `changed` in the place of the body of its fingerprint."""
        return self.with_bodies(changed if b.fingerprint == changed.fingerprint else b for b in self.bodies)
