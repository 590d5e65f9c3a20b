"""How long a scheduled step takes when nothing overlaps: the sum of everything it runs, one after the other.

That is what a step without the latency-hiding scheduler does, so its time is a test of a profile that no contention
blurs; and of any other step it is the time to gain from. Every instruction with a key counts its time alone as often
as the loops around it run, and a pause after it, which a profile holds as `gap_seconds`.

    time = predict(module, Costs(H200, Estimator(profile, H200)), gap_seconds=1.5e-6)
    time.seconds                    # 0.1387
    time.shares[Source.GUESS]       # 0.002
    time.operators[0]               # OperatorTime(key=gemm ... 8192x3584x4096, count=64, seconds=0.0004, ...)

A pause counts once per instruction, also where an instruction is several kernels (a split GEMM, cuDNN's attention
backward): their pauses are in the time of that instruction. What the host does between steps is not in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dhelix.errors import DhelixError
from dhelix.passes.analysis.execution import entered, instructions, trip_count, visits
from dhelix.passes.evaluation.collective_matmul_kernels import kernel_key
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.transfers import transfer_key
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.estimates.estimator import Source
from dhelix.profiles.keys import CollectiveKey, Key


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """All executions of one key.

    Attributes:
      count: in one step, loops counted.
      seconds: of one execution.
      example: an instruction that has the key.
    """

    key: Key
    count: int
    seconds: float
    source: Source
    example: str

    @property
    def total(self) -> float:
        return self.count * self.seconds


@dataclass(frozen=True)
class StepTime:
    """A step's time when nothing overlaps.

    Attributes:
      gap_seconds: the pause after each instruction.
      operators: what it is made of, by total time, longest first.
      unknown_loops: loops whose trip count is unknown; their bodies count once.
    """

    operators: tuple[OperatorTime, ...]
    gap_seconds: float
    unknown_loops: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.busy + self.gaps

    @property
    def unknown_text(self) -> str:
        """What is to be said of `unknown_loops`; "" where there are none."""
        if not self.unknown_loops:
            return ""
        names = ", ".join(self.unknown_loops[:3]) + (", ..." if len(self.unknown_loops) > 3 else "")
        return (
            "Loops that run as often as the data say count once here, so a step takes another time than these: "
            f"{names} ({len(self.unknown_loops)} in all)."
        )

    @property
    def busy(self) -> float:
        """Seconds in which something runs."""
        return sum(o.total for o in self.operators)

    @property
    def gaps(self) -> float:
        """Seconds between the operators."""
        return self.gap_seconds * self.executions

    @property
    def executions(self) -> int:
        return sum(o.count for o in self.operators)

    @property
    def communication(self) -> float:
        """Seconds in collectives; the rest of `busy` is compute."""
        return sum(o.total for o in self.operators if isinstance(o.key, CollectiveKey))

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds by kind of key, longest first."""
        totals: dict[str, float] = {}
        for operator in self.operators:
            totals[operator.key.kind] = totals.get(operator.key.kind, 0.0) + operator.total
        return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))

    @property
    def shares(self) -> dict[Source, float]:
        """Which part of `busy` rests on what; all 0 if nothing runs."""
        totals = dict.fromkeys(Source, 0.0)
        for operator in self.operators:
            totals[operator.source] += operator.total
        return {source: total / (self.busy or 1.0) for source, total in totals.items()}


def predict(module: HloModule, costs: Costs, gap_seconds: float = 0.0) -> StepTime:
    """The time of a scheduled module when nothing overlaps.

    Args:
      costs: from a profile; those of `Costs(hardware)` alone make the prediction the roofline's.
      gap_seconds: idle time after each operator (`profile.Section.gap_seconds`).

    Raises DhelixError if the module is not scheduled.
    """
    if not module.is_scheduled:
        raise DhelixError(
            f"{module.name} is not scheduled, so what it runs is not known; give the compiled step, "
            "such as compiled.as_text() or the *after_optimizations* file of an --xla_dump_to folder"
        )
    operators: dict[Key, OperatorTime] = {}
    for instruction, count in executed(module, costs):
        key = costs.operator_keys[instruction] or kernel_key(instruction) or transfer_key(instruction)
        if key is None:
            continue
        known = operators.get(key)
        if known is not None:
            operators[key] = replace(known, count=known.count + count)
        else:
            cost = costs[instruction]
            operators[key] = OperatorTime(key, count, cost.seconds, cost.source, instruction.name)
    ordered = sorted(operators.values(), key=lambda o: (-o.total, str(o.key)))
    return StepTime(tuple(ordered), gap_seconds, unknown_loops(module, costs))


def executed(module: HloModule, costs: Costs) -> Iterator[tuple[Instruction, int]]:
    """Every instruction that a step runs, loops, calls and branches entered, and how often; of branches the longest."""
    for instruction, visit in instructions(module.entry, partial(_entered, costs)):
        if instruction.opcode not in CONTROL_FLOW:
            yield instruction, visit.count


def unknown_loops(module: HloModule, costs: Costs) -> tuple[str, ...]:
    """Names of loops that run, of a length that nobody knows."""
    loops = (visit.through[-1] for visit in visits(module.entry, partial(_entered, costs)) if visit.through)
    return tuple(dict.fromkeys(i.name for i in loops if i.opcode == "while" and trip_count(i) is None))


def _entered(costs: Costs, control: Instruction) -> Sequence[Computation]:
    if control.opcode != "conditional":
        return entered(control)
    return [max(control.called, key=lambda c: sum(costs[i].seconds for i in c.instructions))]
