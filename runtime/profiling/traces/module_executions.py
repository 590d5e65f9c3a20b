"""Assigns the executions in a trace to the instructions of a scheduled module.

    times = by_instruction(module, executions)
    times[instruction][3].seconds               # its fourth execution

A kernel carries the name of its instruction, with these exceptions:

  - Kernels of an async pair may carry the name of the wrapped instruction: `all-to-all.15.1` for `all-to-all-start.2`.
  - Work that NCCL gives to copy engines carries no name. Collectives run one at a time, in the order of their launch.
    So nameless executions are assigned, in order, to the launches of collectives that the trace does not name. Each
    launch gets the same number of executions. If the number of nameless executions is not a multiple of the number of
    launches, all nameless executions are left out.
  - A control-flow instruction, such as a while loop, has no kernel of its own. Its time is the span from the start of
    the first execution inside to the end of the last.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from dhelix.passes.analysis.execution import collective_launches, counted_trips, entered, executions, sequence_of
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.runtime.profiling.traces.executions import Execution


def by_instruction(module: HloModule, found: Sequence[Execution]) -> dict[Instruction, list[Execution]]:
    """The executions of each instruction, sorted by start.

    The executions of an async pair are listed under its start instruction. Its done instruction has no executions.
    Instructions that did not run are not in the result.

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
    silent = [i for i in collective_launches(module.entry) if i not in times] * steps_in(module, times)
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
    """Maps each name that a kernel may carry to its instruction."""
    running = [i for computation in module.schedule for i in sequence_of(computation)]
    names = {i.name: i for i in running}
    for start in running:
        if start.opcode == "async-start":
            names.update((i.name, start) for called in start.called for i in called.instructions)
    return names


def steps_in(module: HloModule, times: Mapping[Instruction, Sequence[Execution]]) -> int:
    """The number of steps in the trace.

    Each instruction suggests a number: its executions in the trace, divided by its executions in one step. The number
    that most instructions suggest is returned.
    """
    runs = executions(module)
    counts = Counter(len(found) // runs[i.computation] for i, found in times.items() if runs.get(i.computation))
    return max(counts, key=lambda count: (counts[count], count), default=0)


def _inside(instruction: Instruction, times: dict[Instruction, list[Execution]]) -> list[Execution]:
    """The executions of a control-flow instruction, joined from the executions of the instructions inside.

    Each execution of the control flow gets an equal share of the executions inside. This holds for instructions that
    ran as often as most of them say. The trace may have split or joined executions of the others. Each of these goes to
    the nearest execution of the control flow.
    """
    count = counted_trips(instruction)
    if not count:
        return []
    runs = [times[i] for c in entered(instruction) for i in sequence_of(c) if i in times]
    counts = Counter(len(run) // count for run in runs if len(run) % count == 0)
    if not counts:
        return []
    often = max(counts, key=lambda each: (counts[each], each))
    whole = [run for run in runs if len(run) == often * count]
    parts = [[e for run in whole for e in run[n * count : (n + 1) * count]] for n in range(often)]
    spans = [_joined(part, instruction.name) for part in parts]
    between = [(before.end + after.start) / 2.0 for before, after in itertools.pairwise(spans)]
    for execution in (e for run in runs if len(run) != often * count for e in run):
        n = bisect.bisect(between, execution.start)
        spans[n] = _joined((spans[n], execution), instruction.name)
    return spans


def _joined(executions: Sequence[Execution], name: str = "") -> Execution:
    begin, end = min(e.start for e in executions), max(e.end for e in executions)
    return Execution(name, begin, end, sum(e.shared for e in executions))
