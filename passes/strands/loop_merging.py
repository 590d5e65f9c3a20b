"""Merges loops of two strands into one loop, where they are independent and run equally often."""

from dhelix.passes.analysis.names import LAYERS
from dhelix.passes.analysis.work import loop_work
from dhelix.passes.hlo import Computation, Instruction, WhileLoop, graph
from dhelix.passes.hlo.loop_state import merge
from dhelix.passes.hlo.loops import proved_trip_count
from dhelix.passes.manager import PassContext


def merge_loops(
    computation: Computation, forward: list[Instruction], backward: list[Instruction], context: PassContext
) -> list[str]:
    """Merges loops of the two strands, most work first, as long as that closes no circle; then what they hold."""
    computation.sort()
    merged: list[str] = []
    pairs = [(f, b) for f in forward for b in backward if _same_trip_count(f, b)]
    pairs.sort(key=lambda pair: -min(loop_work(pair[0]), loop_work(pair[1])))  # stable: then in program order
    used: dict[Instruction, str] = {}
    for f, b in pairs:
        if f in used or b in used or not _independent(computation, f, b):
            continue
        used |= {f: b.name, b: f.name}
        inner_f, inner_b = loops_of(f.called[0]), loops_of(b.called[0])
        loop, copies_f, copies_b = merge(f, b, LAYERS)
        merged.append(f"{f.name} + {b.name} x {WhileLoop(loop).trip_count}")
        merged += merge_loops(loop.called[0], [copies_f[i] for i in inner_f], [copies_b[i] for i in inner_b], context)
    most = max(map(loop_work, forward), default=0)
    for f in forward:
        if f not in used and backward and loop_work(f) * 4 >= most:  # not those that only draw random numbers
            context.note(f"layer loop not merged: {_why_apart(f, backward, used)}", f)
    return merged


def _why_apart(loop: Instruction, others: list[Instruction], used: dict[Instruction, str]) -> str:
    """Why a loop merged with none of the other strand's."""
    if proved_trip_count(loop) is None:
        return "its number of iterations is not proved"
    alike = [other for other in others if _same_trip_count(loop, other)]
    if not alike:
        proved = map(proved_trip_count, others)
        counts = sorted({"an unproved number of" if count is None else str(count) for count in proved})
        return f"it has {proved_trip_count(loop)} iterations, the other strand's loops have {', '.join(counts)}"
    taken = next((other for other in alike if other in used), None)
    if taken is not None:
        return f"{taken.name}, the other strand's loop of as many iterations, has merged with {used[taken]} already"
    return f"{alike[0].name}, the other strand's loop of as many iterations, must run before or after it"


def _same_trip_count(a: Instruction, b: Instruction) -> bool:
    count = proved_trip_count(a)
    return count is not None and count == proved_trip_count(b)


def _independent(computation: Computation, a: Instruction, b: Instruction) -> bool:
    return b not in graph.descendants(computation, [a]) and a not in graph.descendants(computation, [b])


def loops_of(computation: Computation) -> list[Instruction]:
    return [i for i in computation.instructions if i.opcode == "while"]
