"""Bodies of unrolled layers: solved layer by layer, legal, at least as fast as other orders, and in linear time."""

import time
from collections.abc import Sequence

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.evaluation.roofline_costs import Cost
from dhelix.passes.evaluation.timeline import simulate
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.collective_schedule import list_order
from dhelix.passes.ordering.layer_search import orders_by_layer
from dhelix.passes.ordering.order_rules import Limits
from dhelix.passes.ordering.strand_pairing import plan_body
from dhelix.passes.ordering.strand_sequences import find_strands
from dhelix.profiles.hardware import H200
from dhelix.tests.machine import slowness
from dhelix.tests.passes.schedules import Done, Op, Program, Start, build, runs_rightly

US = 1e-6


def chain(strand: str, layer: int, value: str, works: Sequence[tuple[str, float]]) -> tuple[list, str]:
    """Dependent operators of one layer, `g` for a collective; zero-time operators between them, as in real programs."""
    program: list[Op | Start | Done] = []
    for n, (kind, us) in enumerate(works):
        name = f"{strand}{layer}_{n}"
        for k in range(4):
            program.append(Op(f"{name}_{k}", 0.0, (value,)))
            value = f"{name}_{k}"
        if kind == "g":
            program += [Start(name, us * US, value, size=8), Done(name)]
            value = f"{name}_done"
        else:
            program.append(Op(name, us * US, (value,), size=8))
            value = name
    return program, value


def layers(count: int, head: int = 0) -> tuple[Program, list[str]]:
    """Two strands of transformer layers. Per layer, forward takes 1.2 ms of compute and 0.6 ms of communication,
    backward 2.3 ms and 0.8 ms.
    """
    forward = [("x", 9), ("g", 190), ("x", 146), ("x", 306), ("x", 100), ("g", 191), ("x", 15), ("g", 190), ("x", 634)]
    backward = [
        ("g", 190),
        ("x", 320),
        ("x", 82),
        ("x", 632),
        ("g", 191),
        ("g", 190),
        ("x", 98),
        ("x", 869),
        ("g", 191),
    ]
    program: list[Op | Start | Done] = []
    x, dx, results = "p", "p", []
    for n in range(head):
        program.append(Op(f"head{n}", (100.0 + n) * US, (x,), size=8))
        x = f"head{n}"
    for layer in range(count):
        part, x = chain("f", layer, x, forward)
        other, dx = chain("b", layer, dx, backward)
        program += [*part, *other, Op(f"w{layer}", 300 * US, (f"b{layer}_1",), size=8)]
        results.append(f"w{layer}")
    return program, [*results, x, dx]


def made(count: int, head: int = 0, slack: float = 0.2) -> tuple[Program, HloModule, dict[Instruction, Cost], Limits]:
    program, results = layers(count, head)
    module, costs = build(program, results)
    memory, entry = Memory(module), module.entry
    return program, module, costs, Limits(H200, int(memory.peak(entry, module.schedule[entry]) * (1.0 + slack)), memory)


def test_a_long_body_is_faster_than_the_list_schedule() -> None:
    program, module, costs, limits = made(10, head=5)
    entry = module.entry
    sequence = module.schedule[entry]
    plan = plan_body(entry, sequence, costs, limits)
    verify_sequence(entry, list(plan.order))
    assert runs_rightly(program, plan.order)
    assert plan.strands == 2 and plan.chosen == "paired"
    listed = simulate(entry, list_order(entry, sequence, costs, limits), costs, H200).seconds
    assert simulate(entry, plan.order, costs, H200).seconds == plan.seconds < listed
    assert limits.memory.peak(entry, plan.order) <= limits.bytes
    twin = made(10, head=5)
    again = plan_body(twin[1].entry, twin[1].schedule[twin[1].entry], twin[2], twin[3])
    assert [i.name for i in again.order] == [i.name for i in plan.order]


def test_layers_that_look_alike_are_solved_once() -> None:
    solved = []
    for count in (6, 12):
        _, module, costs, limits = made(count)
        body = find_strands(module.entry, module.schedule[module.entry], costs, limits)
        columns: list[int] = []

        def solve(search, first, second, columns: list[int] = columns) -> tuple[int, ...]:
            columns.append(len(first) + len(second))
            return tuple(sorted(o.number for o in (*first, *second)))

        orders = orders_by_layer(body, costs, limits, solve)
        assert all(sorted(o) == list(range(len(body.operators))) for o in orders)
        solved.append(len(columns))
    assert solved[0] == solved[1] <= 3


def test_nothing_repeats() -> None:
    """A body whose operators all have different lengths is still cut into pieces."""
    program, x = chain("f", 0, "p", [("g" if n % 4 == 1 else "x", 100.0 + n) for n in range(124)])
    module, costs = build(program, [x])
    memory, entry = Memory(module), module.entry
    sequence = module.schedule[entry]
    plan = plan_body(entry, sequence, costs, Limits(H200, memory.peak(entry, sequence), memory))
    verify_sequence(entry, list(plan.order))
    assert plan.seconds <= plan.seconds_xla


def test_time_grows_with_instructions() -> None:
    """Less than in proportion to the layers, because equal layers are solved once."""
    seconds = []
    for count in (15, 60):
        _, module, costs, limits = made(count)
        begin = time.process_time()
        plan_body(module.entry, module.schedule[module.entry], costs, limits)
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 4.0 * seconds[0]
    assert seconds[1] < 8.0 * slowness()
