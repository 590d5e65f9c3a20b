"""Assigns the executions in a trace to the instructions of a scheduled module.

    times = by_instruction(module, executions)
    times[instruction][3].seconds               # its fourth execution

A kernel carries the name of its instruction, with these exceptions:

  - An async pair runs under the name of the wrapped instruction: `all-to-all-start.2` as `all-to-all.15.1`.
  - Work that NCCL gives to copy engines carries no name. Collectives run one at a time, in the order of their launch.
    So nameless executions belong, in order, to the launches of collectives that the trace does not name. Each launch
    has the same number of nameless executions. If their numbers do not divide, they are left out.
  - Control flow runs nothing itself. It lasts from the first execution inside to the last.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dhelix.passes.analysis.collectives import find_collective, is_done
from dhelix.passes.analysis.execution import counted_trips, entered, executions, sequence_of
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.runtime.profiling.traces.executions import Execution


def by_instruction(module: HloModule, found: Sequence[Execution]) -> dict[Instruction, list[Execution]]:
    """Executions of each instruction, sorted by start.

    An async pair's executions belong to its start; its done has none. Instructions that did not run have none.

    Args:
      module: the compiled step.
      found: executions on one GPU.
    """
    names = _names(module)
    times: dict[Instruction, list[Execution]] = {}
    nameless = []
    for execution in sorted(found, key=lambda e: (e.start, e.end)):
        if execution.name in names:
            times.setdefault(names[execution.name], []).append(execution)
        elif not execution.name:
            nameless.append(execution)
    silent = [i for i in _launches(module.entry) if i not in times] * steps_in(module, times)
    pieces, rest = divmod(len(nameless), len(silent) or 1)
    if silent and pieces and not rest:
        for number, instruction in enumerate(silent):
            times.setdefault(instruction, []).append(_joined(nameless[number * pieces : (number + 1) * pieces]))
    for computation in module.schedule:  # callees come first
        for instruction in sequence_of(computation):
            if instruction.opcode in CONTROL_FLOW and (inside := _inside(instruction, times)):
                times[instruction] = inside
    return times


def _names(module: HloModule) -> dict[str, Instruction]:
    """Instructions by the names that their kernels carry."""
    running = [i for computation in module.schedule for i in sequence_of(computation)]
    names = {i.name: i for i in running}
    for start in running:
        if start.opcode == "async-start":
            names.update((i.name, start) for called in start.called for i in called.instructions)
    return names


def steps_in(module: HloModule, times: Mapping[Instruction, Sequence[Execution]]) -> int:
    """The number of steps in the trace, as most instructions indicate."""
    runs = executions(module)
    counts = Counter(len(found) // runs[i.computation] for i, found in times.items() if runs.get(i.computation))
    return max(counts, key=lambda count: (counts[count], count), default=0)


def _launches(computation: Computation) -> Iterator[Instruction]:
    """Collectives in the order in which a step launches them; loops of unknown trip count count once."""
    for instruction in sequence_of(computation):
        if instruction.opcode in CONTROL_FLOW:
            for _ in range(counted_trips(instruction)):
                for inner in entered(instruction)[:1]:
                    yield from _launches(inner)
        elif not is_done(instruction) and find_collective(instruction) is not None:
            yield instruction


def _inside(instruction: Instruction, times: dict[Instruction, list[Execution]]) -> list[Execution]:
    """Executions of control flow, joined from those inside; each of its executions has an equal share of these."""
    count = counted_trips(instruction)
    if not count:
        return []
    runs = [times[i] for c in entered(instruction) for i in sequence_of(c) if i in times]
    often = max((len(run) for run in runs), default=0) // count
    parts = (
        [e for run in runs for e in run[n * len(run) // often : (n + 1) * len(run) // often]] for n in range(often)
    )
    return [_joined(part, instruction.name) for part in parts]


def _joined(executions: Sequence[Execution], name: str = "") -> Execution:
    begin, end = min(e.start for e in executions), max(e.end for e in executions)
    return Execution(name, begin, end, sum(e.shared for e in executions))
