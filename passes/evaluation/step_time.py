"""Predicts the time of a scheduled step if nothing overlaps: the sum of the times of all its instructions.

A step compiled without the latency-hiding scheduler runs like this. So its measured time checks a profile's times of
single operators. For any other step, this time is the baseline that overlap improves on. Every instruction with a key
(`operator_keys`) counts with its time alone, once per iteration of the loops around it. Each execution adds a pause,
which a profile holds as `gap_seconds`.

    time = predict(module, Costs(H200, Estimator(profile, H200)), gap_seconds=1.5e-6)
    time.seconds                    # seconds of the step
    time.shares[Source.GUESS]       # fraction of its busy time that is guessed
    time.operators[0]               # OperatorTime(key=gemm ... 8192x3584x4096, count=64, ...)

A pause counts once per instruction. If an instruction is several kernels (a split GEMM, cuDNN's attention backward),
the pauses between them are part of its time. The time does not include the host's work between steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dhelix.errors import DhelixError
from dhelix.passes.analysis.execution import entered, places, sequence_of, supposed_trips
from dhelix.passes.evaluation.collective_matmul_kernels import kernel_key
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.transfers import transfer_key
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.estimates.estimator import Source
from dhelix.profiles.keys import CollectiveKey, Key


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """All executions of one key in a step.

    Attributes:
      count: executions in one step, with loop iterations counted.
      seconds: seconds of one execution.
      example: name of an instruction with this key.
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
    """A step's time if nothing overlaps.

    Attributes:
      operators: the executions by key, largest total time first.
      gap_seconds: the pause after each execution.
      unknown_loops: names of loops with an unknown trip count; their bodies count once.
    """

    operators: tuple[OperatorTime, ...]
    gap_seconds: float
    unknown_loops: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.busy + self.gaps

    @property
    def unknown_text(self) -> str:
        """A sentence that warns about `unknown_loops`; "" if there are none."""
        if not self.unknown_loops:
            return ""
        names = ", ".join(self.unknown_loops[:3]) + (", ..." if len(self.unknown_loops) > 3 else "")
        return (
            "Each loop with a data-dependent trip count counts as one iteration, so the real step time differs: "
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
        """For each source of times, the fraction of `busy` that comes from it; all 0 if nothing runs."""
        totals = dict.fromkeys(Source, 0.0)
        for operator in self.operators:
            totals[operator.source] += operator.total
        return {source: total / (self.busy or 1.0) for source, total in totals.items()}


def predict(
    module: HloModule,
    costs: Costs,
    gap_seconds: float = 0.0,
    ran: Iterable[tuple[Instruction, int]] | None = None,
) -> StepTime:
    """Predicts the time of a scheduled module if nothing overlaps.

    Args:
      costs: costs from a profile. With `Costs(hardware)`, the prediction is the roofline's.
      gap_seconds: idle seconds after each operator (`profile.Section.gap_seconds`).
      ran: what the step runs, if the caller already knows it (`executed`).

    Raises:
      DhelixError: the module is not scheduled.
    """
    if not module.is_scheduled:
        raise DhelixError(
            f"{module.name} is not scheduled; give the compiled step, "
            "such as compiled.as_text() or the *after_optimizations* file of an --xla_dump_to folder"
        )
    operators: dict[Key, OperatorTime] = {}
    for instruction, count in executed(module, costs) if ran is None else ran:
        key = costs.key(instruction) or kernel_key(instruction) or transfer_key(instruction)
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
    """Yields each instruction that a step runs, and how often. Of a conditional, only the longest branch counts."""
    for visit in places(module, partial(_entered, costs)):
        for instruction in sequence_of(visit.computation):
            if instruction.opcode not in CONTROL_FLOW:
                yield instruction, visit.count


def unknown_loops(module: HloModule, costs: Costs) -> tuple[str, ...]:
    """Names of the loops that a step runs and whose trip count is unknown."""
    loops = (visit.through[-1] for visit in places(module, partial(_entered, costs)) if visit.through)
    return tuple(dict.fromkeys(i.name for i in loops if i.opcode == "while" and supposed_trips(i) is None))


def _entered(costs: Costs, control: Instruction) -> Sequence[Computation]:
    if control.opcode != "conditional":
        return entered(control)
    return [max(control.called, key=lambda c: sum(costs[i].seconds for i in c.instructions))]
