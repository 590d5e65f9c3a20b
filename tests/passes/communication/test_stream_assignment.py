"""Collectives between nodes get their own stream where that is safe. No interleaving of two streams deadlocks."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.passes.analysis.streams import stream_of
from dhelix.passes.communication.stream_assignment import StreamAssignment
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.hardware import H200

MEBI = 1 << 20
NODES_OF_FOUR = dataclasses.replace(H200, gpus_per_node=4)
ROWS, COLUMNS = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"  # a mesh of 2 nodes and 4 GPUs of each
ALL = "{{0,1,2,3,4,5,6,7}}"


def program(*groups: str) -> HloModule:
    """All-gathers of 64 MiB over the groups, all in flight together."""
    names = [f"g{n}" for n in range(len(groups))]
    starts = [
        f"  {name} = (bf16[{4 * MEBI}], bf16[{32 * MEBI}]) all-gather-start(p), dimensions={{0}}, channel_id={n + 1}, "
        f"replica_groups={group}, use_global_device_ids=true"
        for n, (name, group) in enumerate(zip(names, groups, strict=True))
    ]
    dones = [f"  {name}_done = bf16[{32 * MEBI}] all-gather-done({name})" for name in names]
    results = ", ".join(f"{name}_done" for name in names)
    shape = ", ".join([f"bf16[{32 * MEBI}]"] * len(names))
    lines = [f"  p = bf16[{4 * MEBI}] parameter(0)", *starts, *dones, f"  ROOT r = ({shape}) tuple({results})"]
    body = "\n".join(lines)
    return HloModule.from_text(f"HloModule m, is_scheduled=true, num_partitions=8\nENTRY e {{\n{body}\n}}\n")


def assigned(module: HloModule) -> tuple[dict[str, int], PassContext]:
    context = PassContext(strict=True)
    StreamAssignment(NODES_OF_FOUR).run(module, context)
    return {i.name: stream_of(i) for i in starts(module)}, context


def starts(module: HloModule) -> list[Instruction]:
    return [i for i in module.entry.instructions if i.opcode.endswith("-start")]


def test_collectives_between_nodes_run_beside_those_in_a_node() -> None:
    module = program(ROWS, COLUMNS, ROWS)
    in_turn = simulate_module(module, NODES_OF_FOUR).seconds
    streams, context = assigned(module)
    assert streams == {"g0": 0, "g1": 1, "g2": 0}
    assert [note.facts for note in context.notes] == [{"inside": 2, "between": 1}]
    costs = Costs(NODES_OF_FOUR)
    assert {costs[i].lane for i in starts(module)} == {Lane.COMM, Lane.COMM_2}
    alone = {i.name: costs[i].seconds for i in starts(module)}
    assert in_turn == pytest.approx(sum(alone.values()))
    together = max(alone["g0"] + alone["g2"], alone["g1"])
    assert simulate_module(module, NODES_OF_FOUR, costs).seconds == pytest.approx(together)


@pytest.mark.parametrize("groups", [(ROWS, ROWS), (COLUMNS, COLUMNS), (ROWS, ALL)])
def test_one_stream_where_a_second_one_would_not_help_or_is_not_safe(groups: tuple[str, str]) -> None:
    module = program(*groups)
    before = module.to_bytes()
    streams, context = assigned(module)
    assert set(streams.values()) == {0} and module.to_bytes() == before
    assert [note.message[:10] for note in context.notes] == (["left alone"] if ALL in groups else [])


def test_only_what_is_safe_moves() -> None:
    assert assigned(program(ROWS, ALL, COLUMNS))[0] == {"g0": 0, "g1": 0, "g2": 1}


class Machine:
    """Devices with two streams each. A collective ends once it runs on all devices of its group.

    Args:
      launches: (stream, devices) of each collective, in launch order, the same on all devices.
      waits: numbers of collectives that must have ended before a collective begins, smaller than its own.
      room: number of collectives that a device can run at once.
    """

    def __init__(self, launches: Sequence[tuple[int, frozenset[int]]], waits: Sequence[frozenset[int]], room: int):
        self.launches, self.waits, self.room = launches, waits, room

    def moves(self, state: tuple[frozenset[int], frozenset[tuple[int, int]]]) -> list[tuple[int, int]]:
        """(collective, device) pairs that may begin. `state`: collectives that ended, and pairs that run."""
        ended, running = state
        found = []
        for n, (stream, devices) in enumerate(self.launches):
            if n in ended or not self.waits[n] <= ended:
                continue
            for device in devices:
                before = [m for m in range(n) if self.launches[m][0] == stream and device in self.launches[m][1]]
                held = sum(d == device for _, d in running)
                if (n, device) not in running and held < self.room and ended.issuperset(before):
                    found.append((n, device))
        return found

    def after(
        self, state: tuple[frozenset[int], frozenset[tuple[int, int]]], move: tuple[int, int]
    ) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
        ended, running = state[0], state[1] | {move}
        n, devices = move[0], self.launches[move[0]][1]
        if all((n, device) in running for device in devices):
            return ended | {n}, frozenset(pair for pair in running if pair[0] != n)
        return ended, running

    def deadlocks(self) -> bool:
        """Whether any interleaving stops before all collectives have ended."""
        first = (frozenset[int](), frozenset[tuple[int, int]]())
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            moves = self.moves(state)
            if not moves and len(state[0]) < len(self.launches):
                return True
            for move in moves:
                if (following := self.after(state, move)) not in seen:
                    seen.add(following)
                    left.append(following)
        return False

    def ends(self, draw: random.Random) -> bool:
        """Whether one random interleaving ends."""
        state = (frozenset[int](), frozenset[tuple[int, int]]())
        while moves := self.moves(state):
            state = self.after(state, draw.choice(moves))
        return len(state[0]) == len(self.launches)


def machine(nodes: int, gpus: int, draw: random.Random, count: int, room: int = 2) -> Machine:
    """Collectives over the rows (stream 0) and columns (stream 1) of a mesh, in random order with random waits."""
    launches: list[tuple[int, frozenset[int]]] = []
    waits: list[frozenset[int]] = []
    for _ in range(count):
        stream = draw.randrange(2)
        groups = (
            [range(n * gpus, (n + 1) * gpus) for n in range(nodes)]
            if stream == 0
            else [range(g, nodes * gpus, gpus) for g in range(gpus)]
        )
        waited = frozenset(m for m in range(len(launches)) if draw.random() < 0.15)
        for group in groups:
            launches.append((stream, frozenset(group)))
            waits.append(waited)
    return Machine(launches, waits, room)


@pytest.mark.parametrize(("nodes", "gpus", "count"), [(2, 2, 4), (2, 3, 3), (3, 2, 3), (2, 4, 2), (4, 2, 2)])
def test_no_interleaving_of_two_streams_deadlocks(nodes: int, gpus: int, count: int) -> None:
    for seed in range(6):
        assert not machine(nodes, gpus, random.Random(seed), count).deadlocks()


def test_the_check_finds_a_deadlock_where_a_device_has_room_for_one() -> None:
    rows, columns = [frozenset((0, 1)), frozenset((2, 3))], [frozenset((0, 2)), frozenset((1, 3))]
    launches = [*((0, row) for row in rows), *((1, column) for column in columns)]
    nothing = [frozenset[int]()] * len(launches)
    assert Machine(launches, nothing, room=1).deadlocks()
    assert not Machine(launches, nothing, room=2).deadlocks()


@given(st.sampled_from([(2, 8), (8, 2), (4, 8), (8, 8), (2, 32)]), st.integers(0, 10**6))
def test_random_interleavings_on_many_devices_end(mesh: tuple[int, int], seed: int) -> None:
    draw = random.Random(seed)
    assert machine(*mesh, draw, 3).ends(draw)
