"""Programs that measure the time of collectives of every kind and size, within nodes and across nodes.

A planner needs a table of t(kind, bytes, p0 x p1), the time of a collective over p0 GPUs on each of p1 nodes (AMSP,
section IV-A). Here, the table has up to two times for each p0 x p1: for one group of GPUs that communicates alone, and
for several groups at once. This example makes the keys of the table and runs the programs that measure it:

    keys = tables(jax.devices())                  # all-gather 65536B 2x1 groups=1 nccl, ...
    for program in programs(keys, jax.devices(), H200):
        if program.takes_part:                    # False in processes whose GPUs are in no group
            compiled = program.lower().compile()
            where = program.instances(compiled_module(compiled))  # {"all_gather.45": (key, repeat), ...}
            compiled(*program.arguments())        # once to connect the GPUs, then under the profiler

A grouping says how many groups communicate at once, and which shape p0 x p1 they have. There is one program per
grouping. Each collective in the program depends on the previous one, so XLA cannot merge, move or overlap collectives:

    for repeat, key in ...:
        token = all_reduce_max(token)                              # all GPUs of all groups start together
        operand, token = optimization_barrier(buffer[key], token)  # a new value to XLA, so it merges no collectives
        token = token + collective(operand)[0]                     # each result is used before the next collective

`instances` finds each collective in the compiled program by its name scope, and compares the collective with its key.
`seconds` combines the times of all GPUs in a trace into one time.

These programs measure NCCL only. They switch off XLA's own kernels for small all-reduces, because those kernels use
NVLink even if NCCL_P2P_DISABLE is set. To measure the all-reduces that a step really runs, profile the step. The launch
setting of the process (`dhelix.profiles.profile.SETTINGS`) decides whether NCCL uses its own kernels, copy engines or
user buffers. The caller passes this choice as `implementation`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import Collective, find_collective, is_done, is_start, start_of
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.estimates import roofline
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.keys import CollectiveKey
from dhelix.runtime.processes.nodes import nodes_of

SIZES = tuple(2**n for n in range(16, 31))
"""Sizes of measured buffers in bytes, from 64 KiB to 1 GiB."""
MIN_REPEATS, MAX_REPEATS = 2, 5  # few, because each repeat costs compile time; a program can be run several times
COMPILER_OPTIONS: Mapping[str, str | int] = MappingProxyType({
    "xla_gpu_experimental_use_collective_kernels": "",
    # These programs need no autotuning. With it, a process would wait for results of processes that do not take part.
    "xla_gpu_autotune_level": 0,
})  # fmt: skip

_DTYPE = jnp.bfloat16
_ALIGNMENT = 16  # NCCL moves each GPU's share in units of 16 bytes
_AXES = ("group", "member")
_SCOPE = re.compile(r"(?:^|/)table_(\d+)_(\d+)(?:/|$)")
_MARK = re.compile(r"(?:^|/)mark_(\d+)_(\d+)(?:/|$)")
_FREE = frozenset(("tuple", "get-tuple-element", "bitcast", "constant", "parameter"))


def _ring_shift(x: jax.Array, size: int) -> jax.Array:
    return lax.ppermute(x, "member", [(i, (i + 1) % size) for i in range(size)])


_COLLECTIVES: Mapping[str, Callable[[jax.Array, int], jax.Array]] = MappingProxyType({
    "all-gather": lambda x, size: lax.all_gather(x, "member", tiled=True),
    "reduce-scatter": lambda x, size: lax.psum_scatter(x, "member", tiled=True),
    "all-reduce": lambda x, size: lax.psum(x, "member"),
    "all-to-all": lambda x, size: lax.all_to_all(x, "member", 0, 0, tiled=True),
    "collective-permute": _ring_shift,
    "collective-broadcast": lambda x, size: lax.pbroadcast(x, ("member",), 0),  # lowers for GPUs only
})  # fmt: skip
KINDS = tuple(_COLLECTIVES)


@dataclass(frozen=True, order=True, slots=True)
class Grouping:
    """A number of groups of GPUs (`groups`) that communicate at the same time.

    Each group has `gpus_per_node` GPUs on each of `nodes` nodes.
    """

    gpus_per_node: int
    nodes: int
    groups: int

    @classmethod
    def of(cls, key: CollectiveKey) -> Grouping:
        return cls(key.gpus_per_node, key.nodes, key.groups)

    @property
    def size(self) -> int:
        return self.gpus_per_node * self.nodes

    def __str__(self) -> str:
        return f"{self.gpus_per_node}x{self.nodes} groups={self.groups}"


def groupings(nodes: int, gpus_per_node: int) -> list[Grouping]:
    """Returns all groupings whose groups divide the nodes, and the GPUs of a node, evenly.

    Each shape of group occurs with one group alone. If several groups of this shape fit, it also occurs with all of
    them at once. A shape of 2x1 means two GPUs on one node. One node of four GPUs gives 2x1 alone, two 2x1 at once, and
    4x1. Two nodes of two GPUs give 2x1 alone, two 2x1 at once, 1x2 alone, two 1x2 at once, and 2x2.
    """
    found = []
    for across, inside in itertools.product(_divisors(nodes), _divisors(gpus_per_node)):
        siblings = (nodes // across) * (gpus_per_node // inside)
        if across * inside > 1:
            found += [Grouping(inside, across, groups) for groups in sorted({1, siblings})]
    return found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def tables(
    devices: Sequence[Any],
    gpus_per_node: int | None = None,
    *,
    kinds: Sequence[str] = KINDS,
    sizes: Sequence[int] = SIZES,
    implementation: str = "nccl",
) -> list[CollectiveKey]:
    """Returns the keys that can be measured on these devices.

    Args:
      devices, gpus_per_node: see `nodes_of`.
      kinds: kinds of collectives; each must be in KINDS.
      sizes: bytes of the whole buffer on one GPU. A size is rounded down if the GPUs of a group cannot share it evenly
        in pieces of 16 bytes.
      implementation: how NCCL runs collectives under the launch setting of this process. It becomes part of the keys.

    Raises:
      DhelixError: a kind is unknown, there are fewer than two devices, or nodes differ in size.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise DhelixError(f"no tables for {unknown}; choose from {list(KINDS)}")
    if len(devices) < 2:
        raise DhelixError(f"collectives need at least two GPUs, but there is {len(devices)}")
    nodes = nodes_of(devices, gpus_per_node)
    found: dict[CollectiveKey, None] = {}  # an ordered set: rounding can make two sizes equal
    for grouping, kind, size in itertools.product(groupings(len(nodes), len(nodes[0])), kinds, sizes):
        even = size - size % (_ALIGNMENT * grouping.size)
        if even:
            shape = (grouping.gpus_per_node, grouping.nodes, grouping.groups)
            found[CollectiveKey(kind, even, *shape, implementation)] = None
    return list(found)


def repeats_for(keys: Iterable[CollectiveKey], hardware: Hardware, budget_seconds: float) -> dict[CollectiveKey, int]:
    """Returns how often to run each collective, so that all runs together take about `budget_seconds`.

    Quick collectives run MAX_REPEATS times. Slow collectives share the remaining time. Each collective runs at least
    MIN_REPEATS times, even if the total then exceeds the budget. The expected time of a collective is the estimate of
    the roofline model for `hardware`.
    """
    expected = {
        key: roofline.collective_seconds(key.kind, key.bytes, key.group_size, key.nodes, hardware) for key in keys
    }
    repeats: dict[CollectiveKey, int] = {}
    left = budget_seconds
    for key in sorted(expected, key=lambda k: (expected[k], k)):
        share = left / (len(expected) - len(repeats))
        repeats[key] = min(max(int(share / expected[key]), MIN_REPEATS), MAX_REPEATS)
        left -= repeats[key] * expected[key]
    return repeats


def programs(
    keys: Iterable[CollectiveKey],
    devices: Sequence[Any],
    hardware: Hardware,
    gpus_per_node: int | None = None,
    budget_seconds: float = 60.0,
) -> list[TableProgram]:
    """Returns the programs that measure `keys`, one per grouping.

    If there are several processes, each process must pass the same keys. It must run the programs that it takes part
    in, in the order of this list. Then processes that share programs run these programs in the same order.

    Args:
      keys: keys from `tables`.
      devices, gpus_per_node: see `nodes_of`.
      hardware: the GPU and its links. Their bandwidths only decide how often each collective runs.
      budget_seconds: time that one run of all programs should take; see `repeats_for`.

    Raises:
      DhelixError: a key needs more GPUs or nodes than there are.
    """
    nodes = nodes_of(devices, gpus_per_node)
    repeats = repeats_for(keys, hardware, budget_seconds)
    by_grouping: dict[Grouping, dict[CollectiveKey, int]] = defaultdict(dict)
    for key in sorted(repeats):
        by_grouping[Grouping.of(key)][key] = repeats[key]
    return [
        TableProgram(grouping, _mesh(nodes, grouping), MappingProxyType(of))
        for grouping, of in sorted(by_grouping.items())
    ]


def _mesh(nodes: Sequence[Sequence[Any]], grouping: Grouping) -> Mesh:
    """The mesh with the axes `group` and `member`. The members of a group are sorted by node."""
    inside, across = grouping.gpus_per_node, grouping.nodes
    blocks = [
        [device for node in some_nodes for device in node[start : start + inside]]
        for some_nodes in itertools.batched(nodes, across)
        for start in range(0, len(nodes[0]), inside)
    ]
    grid = [block for block in blocks if len(block) == grouping.size][: grouping.groups]
    if len(grid) < grouping.groups:
        present = f"{len(nodes[0])} GPUs on each of {len(nodes)} nodes"
        raise DhelixError(f"{grouping} do not fit: there are {present}; measure on more GPUs")
    return Mesh(np.array(grid), _AXES, axis_types=(AxisType.Auto,) * 2)


@dataclass(frozen=True)
class TableProgram:
    """A program that runs all collectives of one grouping.

    Attributes:
      grouping: the grouping, which all keys of the program share.
      mesh: the mesh with the axes `group` and `member`. It contains only the devices that take part.
      repeats: how often each key runs. The program runs all keys once, then all keys with two or more repeats again,
        and so on. So a drift of the GPUs' clock rates affects all keys alike.
    """

    grouping: Grouping
    mesh: Mesh
    repeats: Mapping[CollectiveKey, int]

    @property
    def keys(self) -> tuple[CollectiveKey, ...]:
        return tuple(self.repeats)

    @property
    def name(self) -> str:
        """The compiled module's name without the prefix `jit_` of JAX, such as `collectives_2x1_groups2`."""
        return f"collectives_{self.grouping.gpus_per_node}x{self.grouping.nodes}_groups{self.grouping.groups}"

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The device ids of each group."""
        return tuple(tuple(device.id for device in group) for group in self.mesh.devices)

    @property
    def takes_part(self) -> bool:
        """Whether this process has devices of the program. A process without such devices must not run the program."""
        return any(device.process_index == jax.process_index() for device in self.mesh.devices.flat)

    def lower(self) -> jax.stages.Lowered:
        """Lowers the program with COMPILER_OPTIONS. The program's result, one number per device, has no meaning."""
        shapes = (jax.ShapeDtypeStruct((n * self.mesh.size,), _DTYPE, sharding=self._sharding) for n in self._elements)
        return self._jit(self._run, self.name).lower(*shapes)

    def arguments(self) -> tuple[jax.Array, ...]:
        """Random buffers, one for each operand size.

        The buffers on one GPU together are about twice as large as the largest of them. They are random, because zeros
        take less power in NCCL's sums and on some links. So collectives of zeros would be faster than in a real step.
        """
        return self._jit(self._random, f"{self.name}_arguments")()

    def instances(self, module: HloModule) -> dict[str, tuple[CollectiveKey, int]]:
        """Returns which collective each instruction of the compiled program runs: instruction name -> (key, repeat).

        The first run of a key is repeat 0. A trace names a kernel after the collective, or after an instruction that
        XLA wrapped around the collective. The result contains both kinds of names.

        Raises:
          DhelixError: XLA merged, split, dropped, changed or overlapped collectives, so their times would be wrong.
        """
        keys, names = self.keys, {}
        for instruction in (i for c in module.computations for i in c.instructions):
            if (scope := _SCOPE.search(instruction.op_name)) and (found := find_collective(instruction)):
                number, repeat = int(scope[1]), int(scope[2])
                if number >= len(keys):
                    raise _changed(f"{instruction.name} is of another program")
                key = keys[number]
                if not self._is(key, found):
                    raise _changed(f"{instruction.name} is not {key}")
                names[instruction.name] = key, repeat
        executed = [names[i.name] for i in module.entry.instructions if i.name in names]
        wanted = Counter(self._order())
        if wrong := sorted((wanted - Counter(executed)) + (Counter(executed) - wanted)):
            key, repeat = wrong[0]
            raise _changed(f"run {repeat} of {key} is there {executed.count((key, repeat))} times")
        if overlapped := _overlapped(module.schedule.get(module.entry, ()), names):
            raise _changed(f"{overlapped} overlaps with another instruction")
        return names

    def marks(self, module: HloModule) -> dict[str, tuple[CollectiveKey, int]]:
        """Maps the name of each tiny all-reduce to the key and repeat of the collective that follows it.

        The trace of a copy engine does not name the collective. So the tiny all-reduces mark where each collective
        begins.
        """
        keys = self.keys
        found = ((i.name, _MARK.search(i.op_name)) for c in module.computations for i in c.instructions)
        return {name: (keys[int(scope[1])], int(scope[2])) for name, scope in found if scope}

    def seconds(self, key: CollectiveKey, durations: Mapping[int, float]) -> float:
        """Returns the time of one run of a collective.

        `durations` maps the id of each device to the seconds that the collective took there. It must not be empty. A
        group's time is the shortest duration in the group. The GPU that arrives last has the shortest duration, because
        it waits for no other GPU. For a broadcast, the group's time is the longest duration, because the source ends as
        soon as it has sent its data. If there are several groups, the time of the slowest group counts. If a group
        spans hosts, `durations` must contain the GPUs of all its hosts.
        """
        of_group = max if key.kind == "collective-broadcast" else min
        known = ([durations[d] for d in group if d in durations] for group in self.groups)
        return max(of_group(found) for found in known if found)

    def _order(self) -> Iterator[tuple[CollectiveKey, int]]:
        for repeat in range(max(self.repeats.values())):
            yield from ((key, repeat) for key, count in self.repeats.items() if repeat < count)

    @property
    def _sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(_AXES))

    @property
    def _elements(self) -> list[int]:
        """Numbers of elements of the operands that the keys need on one device, sorted."""
        return sorted({_operand_elements(key) for key in self.keys})

    def _jit(self, function: Callable[..., Any], name: str) -> Any:
        def program(*arguments: jax.Array) -> Any:
            return function(*arguments)

        program.__name__ = name
        spec = P(_AXES)
        mapped = jax.shard_map(program, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped, compiler_options=dict(COMPILER_OPTIONS))

    def _run(self, *buffers: jax.Array) -> jax.Array:
        operands = dict(zip(self._elements, buffers, strict=True))
        numbers = {key: number for number, key in enumerate(self.repeats)}
        token = jnp.zeros((1,), jnp.float32)
        for key, repeat in self._order():
            with jax.named_scope(f"mark_{numbers[key]}_{repeat}"):
                token = lax.pmax(token, _AXES)
            with jax.named_scope(f"table_{numbers[key]}_{repeat}"):
                operand, token = lax.optimization_barrier((operands[_operand_elements(key)], token))
                result = _COLLECTIVES[key.kind](operand, self.grouping.size)
                token = token + result[:1].astype(jnp.float32)
        return token

    def _random(self) -> tuple[jax.Array, ...]:
        seed = jax.random.fold_in(jax.random.key(0), lax.axis_index(_AXES))
        # Without the barrier XLA compiles the generator into each slice, which is slow.
        longest = lax.optimization_barrier(jax.random.uniform(seed, (self._elements[-1],), _DTYPE, -1, 1))
        return tuple(longest[:n] for n in self._elements)

    def _is(self, key: CollectiveKey, found: Collective) -> bool:
        groups = list(itertools.batched(range(self.mesh.size), self.grouping.size))
        if key.kind == "collective-permute":
            groups = [pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)]
        # An empty list of groups means one group of all devices.
        return (found.kind, found.size) == (key.kind, key.bytes) and list(found.groups or groups[:1]) == groups


def _operand_elements(key: CollectiveKey) -> int:
    share = key.group_size if key.kind == "all-gather" else 1
    return key.bytes // share // jnp.dtype(_DTYPE).itemsize


def _overlapped(sequence: Iterable[Instruction], measured: Collection[str]) -> str | None:
    """The name of the first instruction that runs beside another one, if one of the two is measured; else None."""
    running: list[Instruction] = []
    for instruction in sequence:
        if is_done(instruction):
            running.remove(start_of(instruction))
        elif instruction.opcode not in _FREE:
            if running and any(i.name in measured for i in (instruction, *running)):
                return instruction.name
            if is_start(instruction):
                running.append(instruction)
    return None


def _changed(what: str) -> DhelixError:
    advice = "measure without XLA_FLAGS that change collectives"
    return DhelixError(f"XLA changed a program of the collective tables: {what}; {advice}")
