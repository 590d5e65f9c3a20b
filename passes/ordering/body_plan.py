"""The decision for one computation, as data: which operators run together, in which order, and the predicted time.

A plan of two strands is a sequence of segments. A new segment begins at the launch of a collective if the current
segment holds compute already. A segment holds all operators that are launched until the next segment begins:

    segment | forward                     | backward                     | launched
    1       | all-gather                  | product, product (wgrad)     | all-gather, product, product
    2       | product, attention          | reduce-scatter               | reduce-scatter, product, attention

Segments describe the final order, which has no barriers, so a collective may outlast its segment. The `seconds` of a
segment last until the next segment begins. The `seconds` of all segments add up to the time of the whole computation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dhelix.passes.evaluation.roofline_costs import Cost, Lane
from dhelix.passes.evaluation.timeline import Player
from dhelix.passes.hlo import Computation, Instruction
from dhelix.passes.ordering.order_rules import Limits
from dhelix.passes.ordering.strand_sequences import Body


@dataclass(frozen=True)
class PlannedOperator:
    """An operator of a plan.

    Attributes:
      head: the instruction that stands for the operator. For a collective, this is the start.
      strand: 0 forward, 1 backward; always 0 if the body has one strand.
      seconds: its time alone, including the short instructions that are moved with it (`Operator.light`).
    """

    head: Instruction
    strand: int
    lane: Lane
    seconds: float


@dataclass(frozen=True)
class PlannedSegment:
    """Operators in launch order, and the seconds until the next segment begins."""

    operators: tuple[PlannedOperator, ...]
    seconds: float

    @property
    def seconds_alone(self) -> float:
        """Time of the operators one after the other, without overlap."""
        return sum(o.seconds for o in self.operators)

    def strand(self, number: int) -> tuple[PlannedOperator, ...]:
        return tuple(o for o in self.operators if o.strand == number)


@dataclass(frozen=True)
class BodyPlan:
    """The order of one computation, and how it was found.

    Attributes:
      strands: 1 if all operators are in one strand, else 2.
      order: all instructions, in the chosen order.
      chosen: which of three orders was taken: "xla" (XLA's order), "list" (list scheduling) or "paired" (the search).
      seconds_xla, seconds_list, seconds_paired: the evaluator's times of the three orders, whether they fit into memory
        or not.
      seconds_barriers: time of the best plan of equation 2 (`pairing_table.py`), with a barrier after each segment
        pair; None if there is no such plan.
      bytes: peak memory of `order`.
      bytes_limit: the largest peak memory that is allowed.
    """

    computation: Computation
    strands: int
    segments: tuple[PlannedSegment, ...]
    order: tuple[Instruction, ...]
    chosen: str
    seconds_xla: float
    seconds_list: float
    seconds_paired: float
    seconds_barriers: float | None
    bytes: int
    bytes_limit: int

    @property
    def seconds(self) -> float:
        return {"xla": self.seconds_xla, "list": self.seconds_list, "paired": self.seconds_paired}[self.chosen]

    def facts(self) -> dict[str, Any]:
        """The plan as facts for a note in a report (`PassContext.note`)."""
        operators = [o for s in self.segments for o in s.operators]
        return {
            "computation": self.computation.name,
            "operators": [sum(o.strand == n for o in operators) for n in range(self.strands)],
            "segments": len(self.segments),
            "chosen": self.chosen,
            "seconds_barriers": self.seconds_barriers,
            "seconds_xla": self.seconds_xla,
            "seconds_list": self.seconds_list,
            "seconds_paired": self.seconds_paired,
        }


def segments_of(
    body: Body, order: Sequence[Instruction], costs: Mapping[Instruction, Cost], limits: Limits
) -> tuple[PlannedSegment, ...]:
    """Cuts `order`, any legal order of `body`, into segments."""
    number = {head: n for n, head in enumerate(body.heads)}
    second = {o.number for o in body.second.operators}
    player = Player(costs, limits.hardware, limits.bodies)
    segments: list[list[PlannedOperator]] = [[]]
    begins = [0.0]
    for instruction in order:
        if instruction in number:
            operator = body.operators[number[instruction]]
            launched = segments[-1]
            if operator.lane is not Lane.COMPUTE and any(o.lane is Lane.COMPUTE for o in launched):
                segments.append([])
                begins.append(player.now)
            seconds = operator.seconds + operator.light
            segments[-1].append(PlannedOperator(instruction, int(operator.number in second), operator.lane, seconds))
        player.play(instruction)
    player.drain()
    ends = [*begins[1:], player.now]
    return tuple(PlannedSegment(tuple(s), e - b) for s, b, e in zip(segments, begins, ends, strict=True) if s)
