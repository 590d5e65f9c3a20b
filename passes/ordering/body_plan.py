"""What was decided for one computation, as data: who runs with whom, in which order, and what that should take.

A plan of two strands is a row of segments. Each begins where a collective is launched while compute came before, and
holds all operators launched until the next one begins:

    segment | forward                     | backward                     | launched
    1       | all-gather                  | product, product (wgrad)     | all-gather, product, product
    2       | product, attention          | reduce-scatter               | reduce-scatter, product, attention

Segments describe the final order. There are no barriers in it, so a collective may outlast its segment; `seconds` of a
segment is the time from its first launch to that of the next segment's, and they add up to the time of the whole.
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
      head: the instruction that it is named by, the start where it is a collective.
      strand: 0 forward, 1 backward; always 0 in a body that has one strand.
      seconds: alone, with what travels with it.
    """

    head: Instruction
    strand: int
    lane: Lane
    seconds: float


@dataclass(frozen=True)
class PlannedSegment:
    """Operators in launch order, and seconds until the next segment begins."""

    operators: tuple[PlannedOperator, ...]
    seconds: float

    @property
    def seconds_alone(self) -> float:
        """One operator after the other."""
        return sum(o.seconds for o in self.operators)

    def strand(self, number: int) -> tuple[PlannedOperator, ...]:
        return tuple(o for o in self.operators if o.strand == number)


@dataclass(frozen=True)
class BodyPlan:
    """The order of one computation, and how it was found.

    Attributes:
      strands: 2, or 1 where no two parts are independent.
      order: all instructions.
      chosen: whose order that is: "xla", "list" or "paired".
      seconds_xla, seconds_list, seconds_paired: what the evaluator says of the three, also where one does not fit.
      seconds_barriers: the best plan of equation 2, which has a barrier after each pair of segments; None without.
      bytes: that live at once in `order`, and `bytes_limit`: may live.
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
        """What a report says of it."""
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
    """`order`, any legal one of `body`, as segments."""
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
