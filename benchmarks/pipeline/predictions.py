"""Predicts step times of pipelines without a GPU, from compiled programs and the schedule.

*Ends* are the embedding and the head.

    W, interleaved SI    All trip counts are known: `passes.evaluation.timeline` simulates the whole program.
    1F1B and others      The evaluator simulates the bodies of the program's loops: a layer forward, backward, or both;
                         head; embedding. `passes.pipeline_fold.evaluate` combines these times. Each exchange of the
                         program is a rendezvous. The time outside the loops is added.
    zero-bubble V        There is no program. Uses 1F1B's layers and ends; the gradients of a layer's weights take as
                         long as the products of its forward.
    bidirectional        There is no program. Uses W's layers. A pair's time is the time that W's step spends in pairs,
                         divided by their number.
    without a pipeline   The whole program is simulated.

Costs come from the profile. Layers and ends are timed at the clock that W's step settles at. In schedules that are not
lockstep, a message takes as long as without overlap. Messages that overlap with the next tick (`phases.Messages`) do
not slow it down. If layers communicate, the stages wait for these messages, because XLA does not overlap an exchange
with a loop that contains collectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dhelix.benchmarks.pipeline.variants import VARIANTS, Variant
from dhelix.benchmarks.strands.variants import Setting
from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import find_collective
from dhelix.passes.analysis.execution import sequence_of
from dhelix.passes.analysis.names import ALPHA, BETA
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.timeline import evaluate as play
from dhelix.passes.evaluation.timeline import settled, simulate_module
from dhelix.passes.hlo import Computation, HloModule, Instruction, graph
from dhelix.passes.pipeline_fold import (
    PipelineCosts,
    bidirectional,
    evaluate,
    evaluate_programs,
    fold_layout,
    layout_of,
    make_schedule,
    zero_bubble_v,
)

ZERO_BUBBLE, BIDIRECTIONAL = "zero-bubble V", "bidirectional"
FORWARD, BACKWARD, BOTH = frozenset({BETA}), frozenset({ALPHA}), frozenset({ALPHA, BETA})


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of a pipelined program, for one layer or one micro-batch.

    Attributes:
      forward, backward: one layer.
      both: a layer forward co-executed with another one backward; None if there is no such loop.
      products: the matrix products of a layer forward.
      head, embedding: one stage's part of them, forward and backward; 0 if they have no loop of their own.
      send: one message.
      beside: work outside the loops, once per step: optimizer, casts, sums over the mesh.
      communicates: whether a layer contains collectives.
    """

    forward: float
    backward: float
    both: float | None
    products: float
    head: float
    embedding: float
    send: float
    beside: float
    communicates: bool


class Predictions:
    """Predictions for the programs of one setting, by the names of their variants."""

    def __init__(
        self, setting: Setting, programs: Mapping[str, HloModule], layers: int, stages: int, microbatches: int
    ) -> None:
        self.programs, self.model = programs, setting.costs()
        self.layers, self.stages, self.microbatches = layers, stages, microbatches
        lockstep = (name for name in programs if VARIANTS[name].lockstep)
        folded = programs.get(min(lockstep, key=lambda name: VARIANTS[name].schedule != "w", default=""))
        costs = self.model.costs()
        self.costs = costs if folded is None else settled(folded, costs)
        pipelines = {name: module for name, module in programs.items() if VARIANTS[name].pipelined}
        self.times = {name: times_of(module, self.costs) for name, module in pipelines.items()}

    def all(self) -> dict[str, float]:
        """Predicted milliseconds of a step by variant, also for the two pipelines that have no program."""
        found = {name: self._step(VARIANTS[name]) for name in self.programs}
        zero_bubble = [self._zero_bubble(name) for name in self.times if VARIANTS[name].schedule == "1f1b"]
        both_ways = [self._bidirectional(name, found[name]) for name in self.times if VARIANTS[name].schedule == "w"]
        for name, steps in ((ZERO_BUBBLE, zero_bubble), (BIDIRECTIONAL, both_ways)):
            if steps:
                found[name] = min(steps)
        return {name: 1e3 * seconds for name, seconds in found.items()}

    def facts(self) -> dict[str, Any]:
        """The `Times` of each pipelined program, in milliseconds."""
        return {
            name: {part: round(1e3 * found, 4) if isinstance(found, float) else found for part, found in parts.items()}
            for name, parts in ((name, asdict(times)) for name, times in self.times.items())
        }

    def _step(self, variant: Variant) -> float:
        if not variant.pipelined or variant.lockstep:
            return simulate_module(self.programs[variant.name], self.model.hardware, self.model.costs()).seconds
        layout = layout_of(variant.schedule, self.layers, self.stages, variant.chunks)
        schedule = make_schedule(variant.schedule, layout, self.microbatches)
        times, costs = self.times[variant.name], self._costs(variant.name)
        found = evaluate(schedule, costs, meetings=True, sends_beside=not times.communicates)
        return float(found.step_time) + times.beside

    def _costs(self, name: str) -> PipelineCosts:
        times, shared = self.times[name], VARIANTS[name].shared_ends
        whole = self.stages if shared else 1  # stages that share the model's ends
        return PipelineCosts(
            forward=times.forward,
            backward=times.backward,
            co_executed=times.both,
            weight_gradient=min(times.products, times.backward),
            embedding=whole * times.embedding,
            head=whole * times.head,
            shared_ends=shared,
            send=times.send,
        )

    def _zero_bubble(self, name: str) -> float:
        costs = self._costs(name)
        programs = zero_bubble_v(fold_layout(self.layers, self.stages), self.microbatches, costs)
        return float(evaluate_programs(programs, programs, costs).step_time) + self.times[name].beside

    def _bidirectional(self, name: str, step: float) -> float:
        times, beside = self.times[name], min(times.beside for times in self.times.values())
        padded = fold_layout(self.layers, self.stages).padded
        alone = 2 * self.stages * padded * (times.forward + times.backward)
        pair = (step - beside - alone) / ((2 * self.microbatches - 2) * padded)
        costs = PipelineCosts(times.forward, times.backward, co_executed=pair)
        plain = replace(costs, co_executed=None)
        programs, alone_programs = (
            bidirectional(self.layers, self.stages, self.microbatches, some) for some in (costs, plain)
        )
        return float(evaluate_programs(programs, alone_programs, costs).step_time) + beside


def times_of(module: HloModule, costs: Costs) -> Times:
    """The times of a program's parts. Times of layers and ends are medians over all loops of the same kind.

    Raises:
      DhelixError: the layers have no loops, as in chunks of one layer.
    """
    bodies = list(_innermost(module.entry))
    layers = {kind: [_seconds(sequence_of(b), costs) for b in bodies if _strands(b) == kind] for kind in _KINDS}
    if not layers[FORWARD] or not layers[BACKWARD]:
        raise DhelixError("a chunk has one layer alone, so no loop shows what a layer takes: take more layers")
    ahead = next(body for body in bodies if _strands(body) == FORWARD)
    ends = [body for body in bodies if not _strands(body)]
    heads = [_seconds(sequence_of(body), costs) for body in ends if any(map(_is_product, graph.walk(body)))]
    others = [_seconds(sequence_of(body), costs) for body in ends if not any(map(_is_product, graph.walk(body)))]
    sends = [costs[i].seconds for i in graph.walk(module.entry) if _kind(i) == "collective-permute"]
    beside = [i for i in sequence_of(module.entry) if not _of_ticks(i)]
    return Times(
        forward=statistics.median(layers[FORWARD]),
        backward=statistics.median(layers[BACKWARD]),
        both=_median(layers[BOTH]) or None,
        products=sum(costs[i].seconds for i in ahead.instructions if _is_product(i)),
        head=_median(heads),
        embedding=2 * _median(others),  # a loop forward and one backward
        send=_median(sends),
        beside=_seconds(beside, costs),
        communicates=any(map(_kind, graph.walk(ahead))),
    )


_KINDS = (FORWARD, BACKWARD, BOTH)


def _innermost(computation: Computation) -> Iterator[Computation]:
    """Bodies of the pipeline's innermost loops: layers, and ends that a stage computes alone."""
    for loop in computation.instructions:
        if loop.opcode == "while" and _of_ticks(loop):
            inner = list(_innermost(loop.called[0]))
            yield from inner or [loop.called[0]]


def _of_ticks(instruction: Instruction) -> bool:
    """Whether `instruction` belongs to a loop over ticks, or to one with a single iteration, which XLA has unrolled."""
    name = instruction.op_name
    return "/while" in name or f"/{ALPHA}/" in name or f"/{BETA}/" in name


def _strands(computation: Computation) -> frozenset[str]:
    """The strands whose matrix products run in a computation."""
    names = [i.op_name for i in graph.walk(computation) if _is_product(i)]
    return frozenset(strand for strand in (ALPHA, BETA) if any(f"{strand}/" in name for name in names))


def _is_product(instruction: Instruction) -> bool:
    return instruction.opcode == "dot" or instruction.proto.custom_call_target.startswith("__cublas")


def _kind(instruction: Instruction) -> str:
    """The kind of the collective that begins at `instruction`; "" if none does."""
    found = find_collective(instruction)
    return "" if found is None else found.kind


def _seconds(order: Sequence[Instruction], costs: Costs) -> float:
    return play(order, costs).seconds


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
