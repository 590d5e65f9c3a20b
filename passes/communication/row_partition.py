"""Splits chains from an all-gather to a reduce-scatter into parts of the rows, where only one strand runs.

Before, 2048 rows on each device:               After, 2 parts of 1024 rows on each device:
    g = bf16[8192,K] all-gather(x)                  g0 = bf16[4096,K] all-gather(x[0:1024])
    a = bf16[8192,F] dot(g, w)                      g1 = bf16[4096,K] all-gather(x[1024:2048])
    b = bf16[8192,F] tanh(a)                        r0 = reduce-scatter(dot(tanh(dot(g0, w)), v))
    y = bf16[8192,K] dot(b, v)                      r1 = reduce-scatter(dot(tanh(dot(g1, w)), v))
    r = bf16[2048,K] reduce-scatter(y)              r  = bf16[2048,K] concatenate(r0, r1)

    network   | g               |         | r               |        | g0     | g1     | r0     | r1     |
    compute   |                 | a  b  y |                 |                 | a b y  | a b y  |

Contract
    Consumes  the partitioned program, before collectives are asynchronous and before fusion (PRE_SCHEDULER). A chain is
              an all-gather, a reduce-scatter over the same devices, and all computation between them.
    Makes     one chain for each part of the rows. Other users of the whole arrays, such as the backward pass, read the
              joined parts. Combiner keys keep XLA from combining the parts' collectives again.
    Leaves    chains in which rows interact (attention), chains that contain another collective, and chains that are not
              faster in parts according to `model`. It also leaves computations where both strands run
              (`pattern.co_executes`), because each strand hides the other's collectives. There is one note for each
              reason.

Why it is legal: the result for a row depends on that row alone (`rows.py`). Both collectives treat all rows alike. So
each part has the same values as before. Products of fewer rows may sum in another order.

Cost: the collectives of n parts together take longer than the whole collectives. Products may take longer, too. Joined
arrays are written once more. Where one strand runs alone, nothing else hides these collectives. So the parts save time
if a computation's collectives take longer than its products. MegaScale ("Scaling Large Language Model Training to More
Than 10,000 GPUs") section 3.2 pipelines each collective with the adjacent product. Here, the parts stay separate until
the last collective of the chain, so no instruction in the chain waits for a whole array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import device_groups, find_collective, free_channel, keep_apart, kept_apart
from dhelix.passes.communication.collective_matmul.pattern import ORDERED, Unfit, co_executes, is_sum, mesh_axis
from dhelix.passes.communication.exchange import REPLACED, UNMEASURED, Alone, is_one_of, key_text
from dhelix.passes.communication.rows import Parts, Rows, follow
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, graph
from dhelix.passes.hlo.edit import drop_dead, replace_all_uses
from dhelix.profiles.keys import CollectiveKey

_PART = "part "  # prefix of the parts' combiner keys
_PRODUCTS = ("dot", "custom-call")  # attention is a custom call; other operations do not count, as they are not fused


@dataclass(frozen=True)
class RowPartition:
    """Splits chains from an all-gather to a reduce-scatter into parts of the rows.

    Attributes:
      model: costs that decide which chains are split. They hold for one launch setting. Without a model (None),
        `costs_decide` decides.
      parts: number of parts of each device's rows, 2 or more.
      only: keys of the all-gathers whose chains are split; None means all. They are compared by kind, bytes and groups.
      costs_decide: only matters without a model. If True, all chains stay whole. If False, every chain that can be
        split is split.
    """

    model: CostModel | None = None
    parts: int = 2
    costs_decide: bool = False
    only: tuple[CollectiveKey, ...] | None = None

    name = "row-partition"
    stage = Stage.PRE_SCHEDULER

    def __post_init__(self) -> None:
        if self.parts < 2:
            raise DhelixError(f"parts={self.parts} does not split the rows; give 2 or more")

    def run(self, module: HloModule, context: PassContext) -> bool:
        if module.is_scheduled:
            context.note("left alone: the module is scheduled")
            return False
        if self.costs_decide and self.model is None:
            context.note(f"left alone: {UNMEASURED}")
            return False
        left, done, channel, split = Counter[str](), 0, free_channel(module), set[str]()
        alone = None if self.model is None else Alone(self.model)
        for computation in list(module.computations):
            for chain in _worth_it(computation, self.parts, alone, left):
                if self.only is not None and not is_one_of(chain.gather, self.only):
                    continue
                split.add(key_text(chain.gather))
                _partition(chain, self.parts, channel)
                channel += 2 * self.parts
                done += 1
        context.left_alone(left)
        if done:
            words = f"chains from all-gather to reduce-scatter split into {self.parts} parts"
            context.note(words, count=done, **{REPLACED: sorted(split)})
        return bool(done)


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain to split.

    Attributes:
      steps: the instructions between gather and scatter, operands first.
      rows: position of the rows in the gather's result, in each step, and in the scatter's result.
    """

    gather: Instruction
    steps: tuple[Instruction, ...]
    scatter: Instruction
    rows: dict[Instruction, Rows]


def pays(module: HloModule, model: CostModel) -> bool:
    """Whether any chain of a module is predicted to be faster in parts. The module is not changed."""
    found = (_worth_it(c, RowPartition.parts, Alone(model), Counter()) for c in module.computations)
    return any(True for chains in found for _ in chains)


def _worth_it(computation: Computation, parts: int, alone: Alone | None, left: Counter[str]) -> Iterator[Chain]:
    """The chains that can be split and, if costs are known, are faster in parts.

    Counts in `left` why other chains stay whole.
    """
    why_none = _why_none(computation, alone)
    for chain in find_chains(computation, parts, left):
        if reason := why_none or _why_too_dear(chain, parts, alone):
            left[reason] += 1
        else:
            yield chain


def find_chains(computation: Computation, parts: int, left: Counter[str]) -> Iterator[Chain]:
    """The chains of a computation that can be split into `parts`. Counts in `left` why other reduce-scatters stay.

    Chains are found lazily: the caller may change the computation before it asks for the next chain.
    """
    order: list[Instruction] = []
    place: dict[Instruction, int] = {}
    for scatter in [i for i in computation.instructions if i.opcode == "reduce-scatter"]:
        if computation.instructions is not order:  # at first, and after a chain was split
            order = computation.instructions
            place = {i: n for n, i in enumerate(order)}
        reasons = ["no all-gather leads to the reduce-scatter without another collective in between"]
        for gather in sorted(_gathers_before(scatter), key=place.__getitem__, reverse=True):
            try:
                yield _chain(gather, scatter, order[place[gather] + 1 : place[scatter]], parts)
                break
            except Unfit as error:
                reasons.append(str(error))
        else:
            left[reasons[min(1, len(reasons) - 1)]] += 1  # the reason of the nearest all-gather


def _gathers_before(scatter: Instruction) -> set[Instruction]:
    """The all-gathers on which a scatter depends without another collective in between."""
    found: set[Instruction] = set()
    seen: set[Instruction] = set()
    pending = list(scatter.operands)
    while pending:
        top = pending.pop()
        if top in seen:
            continue
        seen.add(top)
        if top.opcode == "all-gather":
            found.add(top)
        elif find_collective(top) is None:
            pending += top.operands
    return found


def _on_the_way(gather: Instruction, scatter: Instruction, between: Sequence[Instruction]) -> list[Instruction]:
    """The instructions of `between` that are on a path from the gather to the scatter."""
    below, above = {gather}, {*scatter.operands, *scatter.control_predecessors}
    for instruction in between:
        if not below.isdisjoint((*instruction.operands, *instruction.control_predecessors)):
            below.add(instruction)
    for instruction in reversed(between):
        if instruction in above:
            above.update(instruction.operands, instruction.control_predecessors)
    return [i for i in between if i in below and i in above]


def _chain(gather: Instruction, scatter: Instruction, between: Sequence[Instruction], parts: int) -> Chain:
    """The chain from gather to scatter. Raises Unfit if the chain cannot be split.

    `between` has all instructions between gather and scatter.
    """
    if mesh_axis(gather) != mesh_axis(scatter) or device_groups(gather) != device_groups(scatter):
        raise Unfit("the all-gather and the reduce-scatter run over different devices")
    if not is_sum(scatter):
        raise Unfit("the reduce-scatter does not sum")
    if _PART in kept_apart(gather):
        raise Unfit("the chain is already a part")
    dimension, devices = gather.proto.dimensions[0], mesh_axis(gather)[1]
    size = gather.shape.dimensions[dimension]
    if size % (devices * parts):
        raise Unfit(f"the rows do not divide into {parts} parts")
    steps = _on_the_way(gather, scatter, between)
    rows = {gather: Rows(dimension, 1, 1, devices, size)}
    for step in steps:
        if find_collective(step) is not None:
            raise Unfit("another collective is in the chain")
        found = follow(step, rows)
        if found is None:
            raise Unfit(f"a {step.opcode} in the chain mixes rows")
        rows[step] = found
    (summed,) = scatter.operands
    if summed not in rows or summed is gather or not any(step.opcode == "dot" for step in steps):
        raise Unfit("no product is in the chain")
    if not rows[summed].is_alone or rows[summed].dimension != scatter.proto.dimensions[0]:
        raise Unfit("the reduce-scatter does not scatter the rows")
    if not graph.tied(gather.computation).isdisjoint((gather, *steps, scatter)):
        raise Unfit(ORDERED)
    rows[scatter] = replace(rows[summed], devices=1, size=size // devices)
    return Chain(gather, tuple(steps), scatter, rows)


def _partition(chain: Chain, count: int, channel: int) -> None:
    """Replaces a chain by `count` parts. The parts' collectives get the channel ids from `channel` upward."""
    computation, gather, scatter, rows = chain.gather.computation, chain.gather, chain.scatter, chain.rows
    users, inner = computation.users(), {*chain.steps, scatter}
    read = [i for i in (gather, *chain.steps) if i is computation.root or not inner.issuperset(users[i])]
    parts = Parts(Builder(computation), count)
    (operand,), (summed,) = gather.operands, scatter.operands
    local = replace(rows[gather], devices=1, size=operand.shape.dimensions[gather.proto.dimensions[0]])
    made: list[dict[Instruction, Instruction]] = []
    for number in range(count):
        own = {operand: parts.take(operand, local, number)}
        own[gather] = parts.part(gather, rows[gather], number, own)
        begun = own[gather]
        if made:  # otherwise XLA fuses parts that read the same arrays, and the fusion waits for all parts
            begun, made[-1][summed] = parts.builder.barrier([begun, made[-1][summed]])
        known = {gather: begun}
        for step in chain.steps:
            known[step] = parts.part(step, rows[step], number, {o: known[o] for o in step.operands if o in known})
        made.append({**known, gather: own[gather]})
    for number, own in enumerate(made):
        own[scatter] = parts.part(scatter, rows[scatter], number, own)
        for collective, which in ((own[gather], 2 * number), (own[scatter], 2 * number + 1)):
            collective.proto.channel_id = channel + which
            keep_apart(collective, f"{_PART}{number}")
    whole = {i: parts.join([own[i] for own in made], i, rows[i]) for i in (*read, scatter)}
    replace_all_uses(computation, whole)
    computation.sort()
    drop_dead(computation)


def _why_none(computation: Computation, alone: Alone | None) -> str:
    """Why all chains of a computation stay whole; "" if some may be split."""
    if co_executes(computation):
        return "the other strand hides the collectives"
    if alone is None:
        return ""
    communication = sum(alone.seconds(i) for i in computation.instructions if find_collective(i) is not None)
    products = sum(alone.seconds(i) for i in computation.instructions if i.opcode in _PRODUCTS)
    return "products take longer than communication" if communication < products else ""


def _why_too_dear(chain: Chain, parts: int, alone: Alone | None) -> str:
    """Why a chain stays whole; "" if its parts take less time when nothing else runs."""
    if alone is None:
        return ""
    gather, scatter = alone.seconds(chain.gather), alone.seconds(chain.scatter)
    gather_part, scatter_part = alone.seconds(chain.gather, parts), alone.seconds(chain.scatter, parts)
    between = sum(alone.seconds(step) for step in chain.steps)
    computed = scattered = 0.0  # times at which all parts so far are computed and scattered
    for number in range(parts):
        computed = max(computed, (number + 1) * gather_part) + between / parts
        scattered = max(scattered, computed, parts * gather_part) + scatter_part
    return "" if scattered < gather + between + scatter else "parts are not faster"
