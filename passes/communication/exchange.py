"""Shared parts of the decomposition passes, which replace collectives by other collectives.

All-to-alls replace all-gathers and reduce-scatters. All-gathers replace collective-permutes in which pairs of devices
swap arrays.

An all-to-all sends each device its part directly. On symmetric memory, it runs on copy engines, which occupy no SMs.
Through host memory, it reaches more bandwidth than the rings of NCCL's other collectives (docs/research_log.md).

Exposed communication is replaced if the profile says that the replacement is faster (`is_faster`). If compute hides the
communication, faster communication gains little, and the added pass over memory costs compute time. So collectives that
compute should hide are replaced only if communication takes longer than compute (`is_communication_bound`; see
docs/research_log.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from dhelix.passes.analysis.collectives import GROUP_FIELDS, Groups, device_groups, find_collective
from dhelix.passes.analysis.execution import counted_trips, entered
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.evaluation.operator_keys import OperatorKeys, collective_key
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, Shape, edit, shapes
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.estimates import roofline
from dhelix.profiles.keys import CollectiveKey

INSTEAD = {"all-gather": "all-to-all", "reduce-scatter": "all-to-all", "collective-permute": "all-gather"}
KINDS = tuple(INSTEAD)
REPLACED = "replaced"
"""Name of the fact that says which collectives a pass has replaced or split, as keys."""
UNMEASURED = "no measured costs say whether it pays"
MIN_BYTES = 4 << 20
"""Minimal bytes of the whole buffer on one device. Latency, not bandwidth, dominates the time of smaller messages."""
_ANY = 1 << 30  # GPUs per node, for keys in which node boundaries do not count
_GAIN = 0.05
"""Required gain, as a fraction of the collective's time. Times on two machines differ by half of this fraction."""


@dataclass(frozen=True)
class Decomposition:
    """Base class of the decomposition passes.

    Attributes:
      model: costs that decide which collectives are replaced. They hold only for one launch setting, and the process
        must run with this setting. If None, every collective that is large enough is replaced, unless `overlapped`.
      overlapped: whether compute should hide the collectives. If so, `why_none` decides whether any of them are
        replaced.
      min_bytes: minimal size of the buffer (see `MIN_BYTES`).
      only: the pass replaces only collectives with one of these keys. Keys are compared by kind, bytes and groups.
        If None, there is no restriction.
    """

    model: CostModel | None = None
    overlapped: bool = False
    min_bytes: int = MIN_BYTES
    only: tuple[CollectiveKey, ...] | None = None

    stage = Stage.PRE_SCHEDULER

    def replace_all(
        self,
        module: HloModule,
        context: PassContext,
        kind: str,
        why_not: Callable[[Instruction], str],
        decompose: Callable[[Instruction], None],
    ) -> bool:
        """Runs `decompose` on each collective of `kind` that should be replaced.

        Adds notes to `context`: the number of replaced collectives, and why other collectives stay.

        Args:
          module: the module to change.
          context: takes the notes.
          kind: the opcode of the collectives.
          why_not: returns why a collective cannot be replaced; "" if it can.
          decompose: replaces one collective.

        Returns:
          Whether anything changed.
        """
        if self.overlapped and (reason := self.why_none(module)):
            context.note(f"left alone: {reason}")
            return False
        done, left, replaced = 0, Counter[str](), set[str]()
        for computation in list(module.computations):
            for collective in [i for i in computation.instructions if i.opcode == kind and self._wanted(i)]:
                reason = why_not(collective) or why_too_dear(collective, self.model, self.min_bytes)
                if reason:
                    left[reason] += 1
                else:
                    replaced.add(key_text(collective))
                    decompose(collective)
                    done += 1
        context.left_alone(left)
        if done:
            context.note(f"{kind}s are now {INSTEAD[kind]}s", count=done, **{REPLACED: sorted(replaced)})
        return bool(done)

    def _wanted(self, instruction: Instruction) -> bool:
        return self.only is None or is_one_of(instruction, self.only)

    def why_none(self, module: HloModule) -> str:
        """Why all collectives stay if compute should hide them; "" if some may be replaced."""
        if self.model is None:
            return UNMEASURED
        return "" if is_communication_bound(module, self.model) else "compute takes longer than communication"


def key_text(collective: Instruction) -> str:
    """The key of a collective as plans name it. Node boundaries do not count."""
    found = find_collective(collective)
    return "" if found is None else str(collective_key(found, _ANY, "nccl"))


def is_one_of(instruction: Instruction, keys: Iterable[CollectiveKey]) -> bool:
    """Whether a collective has one of these keys. Keys are compared by kind, bytes and groups."""
    found = find_collective(instruction)
    return found is None or _alike(collective_key(found, _ANY, "nccl")) in {_alike(key) for key in keys}


def _alike(key: CollectiveKey) -> tuple[str, int, int, int]:
    """The parts of a key that do not depend on node boundaries and implementation."""
    return key.kind, key.bytes, key.group_size, key.groups


def why_not(collective: Instruction) -> str:
    """Why an all-to-all cannot replace a reduce-scatter or an all-gather; "" if it can."""
    if len(collective.operands) != 1 or shapes.is_tuple(collective.shape):
        return "it has several operands"
    if not collective.proto.channel_id:
        return "it runs over replicas, not partitions"
    found = find_collective(collective)
    dimension = collective.proto.dimensions[0]
    sizes = [collective.operands[0].shape.dimensions[dimension], collective.shape.dimensions[dimension]]
    if found is None or not device_groups(collective) or found.group_size(default=0) * min(sizes) != max(sizes):
        return "its groups are unknown or do not match its shapes"
    return ""


def why_too_dear(collective: Instruction, model: CostModel | None, min_bytes: int) -> str:
    """Why a replacement of `collective` saves no time; "" if it saves time. Without a model, only the size decides."""
    found = find_collective(collective)
    if found is None or found.size < min_bytes:
        return f"it is smaller than {min_bytes} bytes"
    if model is None:
        return ""
    key = OperatorKeys(model.hardware.gpus_per_node, model.implementation)[collective]
    if not isinstance(key, CollectiveKey):
        return "its cost is unknown"
    return "" if is_faster(key, model) else f"an {INSTEAD[key.kind]} is not faster"


def is_faster(key: CollectiveKey, model: CostModel) -> bool:
    """Whether the replacement saves more than a fraction `_GAIN` of the collective's time.

    The time of the replacement includes its pass over memory. All times are those of operators that run alone.
    """
    swaps = key.kind == "collective-permute"
    moved = 2 * key.bytes if swaps else key.bytes + key.bytes // key.group_size
    other = replace(key, kind=INSTEAD[key.kind], bytes=2 * key.bytes if swaps else key.bytes)
    exchange = model.estimator.solo(other).seconds
    enough = (1.0 - _GAIN) * model.estimator.solo(key).seconds
    return exchange + roofline.memory_seconds(moved, model.hardware) < enough


def faster(module: HloModule, model: CostModel) -> tuple[CollectiveKey, ...]:
    """The keys of the large collectives whose replacement is faster. Collective-permutes count only if they swap."""
    keys = OperatorKeys(model.hardware.gpus_per_node, model.implementation)
    found = set[CollectiveKey]()
    for instruction in (i for c in module.computations for i in c.instructions):
        collective = find_collective(instruction)
        if collective is None or (collective.kind == "collective-permute" and not is_swap(collective.groups)):
            continue
        key = keys[instruction]
        if isinstance(key, CollectiveKey) and key.kind in KINDS and key.bytes >= MIN_BYTES and is_faster(key, model):
            found.add(key)
    return tuple(sorted(found))


def in_words(keys: Iterable[CollectiveKey]) -> str:
    """The kinds of collectives in the plural, such as "all-gathers and reduce-scatters"; "" for none."""
    return " and ".join(f"{kind}s" for kind in sorted({key.kind for key in keys}))


def is_swap(pairs: Groups) -> bool:
    """Whether every device sends to the device that it receives from, and none to itself."""
    return bool(pairs) and all(a != b and (b, a) in pairs for a, b in pairs)


class Alone:
    """Seconds that the operators of an unscheduled module take alone.

    The profile gives the times of collectives, and the roofline the times of other operators.
    """

    def __init__(self, model: CostModel) -> None:
        self._keys = OperatorKeys(model.hardware.gpus_per_node, model.implementation)
        self._costs = Costs(model.hardware)
        self._estimator = model.estimator

    def seconds(self, instruction: Instruction, parts: int = 1) -> float:
        """Seconds of an instruction that is not control flow. A collective is timed with 1 / `parts` of its bytes."""
        key = None if find_collective(instruction) is None else self._keys[instruction]
        if not isinstance(key, CollectiveKey):
            return self._costs[instruction].seconds
        return self._estimator.solo(replace(key, bytes=key.bytes // parts)).seconds


def is_communication_bound(module: HloModule, model: CostModel) -> bool:
    """Whether the collectives of an unscheduled module take longer than all other instructions, if each runs alone."""
    alone = Alone(model)
    known: dict[Computation, tuple[float, float]] = {}

    def loads(computation: Computation) -> tuple[float, float]:
        """Seconds of communication and of everything else."""
        if computation not in known:
            communication = rest = 0.0
            for instruction in computation.instructions:
                if instruction.opcode in CONTROL_FLOW:
                    count = counted_trips(instruction)
                    inner = max(map(loads, entered(instruction)), key=sum)  # the longest branch, as in `costs`
                    communication, rest = communication + count * inner[0], rest + count * inner[1]
                elif find_collective(instruction) is None:
                    rest += alone.seconds(instruction)
                else:
                    communication += alone.seconds(instruction)
            known[computation] = communication, rest
        return known[computation]

    communication, rest = loads(module.entry)
    return communication > rest


def all_to_all(builder: Builder, operand: Instruction, like: Instruction) -> Instruction:
    """Makes an all-to-all of `operand`, with the dimension and the groups of `like`.

    In each group, part k goes to the k-th device.
    """
    made = builder.make("all-to-all", array(operand.shape.element_type, operand.shape.dimensions), [operand])
    made.proto.dimensions.extend(like.proto.dimensions)
    made.proto.channel_id = like.proto.channel_id
    for field in GROUP_FIELDS:
        getattr(made.proto, field).MergeFrom(getattr(like.proto, field))
    return made


def put_in_place(old: Instruction, first: Instruction, last: Instruction) -> None:
    """Removes `old`. The instructions from `first` to `last` take its place, also in control dependencies."""
    computation = old.computation
    first.control_predecessors = old.control_predecessors
    for other in computation.instructions:
        other.control_predecessors = [last if p is old else p for p in other.control_predecessors]
    edit.replace_uses(computation, old, last)
    computation.instructions.remove(old)


def array(element_type: int, dimensions: Iterable[int]) -> Any:
    """A shape without a layout; XLA assigns layouts later."""
    return Shape(element_type=element_type, dimensions=dimensions)
