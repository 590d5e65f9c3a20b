"""Skews the strands: each iteration also runs the first k layers of the next micro-batch.

Before, M micro-batches of L layers:       After (F1, B1: the first k layers; F2, B2: the others):
    while i < M:                               F1(0)
      F(i)   forward layers, head              while i < M - 1:
      B(i)   backward layers                     F2(i), head, B2(i), B1(i)
                                                 F1(i+1)
                                               F2(M-1), head, B2(M-1), B1(M-1)

F(i) and B(i) are the forward and the backward pass of micro-batch i. `strand_duplication` turns this loop into the
strand loop: B2(i-1) + F2(i), head, B1(i-1) + F1(i+1). Before and after the strand loop, `strand_ends` then finds layers
of two micro-batches that do not depend on each other, and merges them. Without skew, F(0) and B(M-1) run alone. They
are 1/M of the step, and nothing hides their communication.

Contract
    Consumes  a loop over at least three micro-batches that `forward_backward_cut` partitions. The loop has one forward
              and one backward layer loop of the same proved trip count L >= 2k. The pass must run before
              strand_duplication.
    Makes     the loop above. Each layer loop becomes two loops, with names that say which layers they run. Each stack
              of residuals becomes two stacks, of k and of L - k slots. So the residuals of the first k layers can live
              longer. Gradients are added up layer by layer (`gradient_accumulation`).
    Leaves    everything else. If a loop over micro-batches cannot be skewed, the pass raises PassRefusal with the
              reason.

Why it is legal: F1(i+1) consists of the instructions up to the first k layers. Like all of F(i+1), it reads nothing
that the backward pass writes (`forward_backward_cut`, rule 2). It starts from the state that iteration i leaves. So
each micro-batch computes the same values as before.
Cost: the residuals of k layers of a third micro-batch are alive. XLA compiles and schedules two to three times as many
loops. Skew helps if communication is exposed (docs/research_log.md). The DHelix paper does not hide the communication
of the first and last passes (section 4.1, arXiv 2411.15871).
"""

from dataclasses import dataclass

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.analysis.names import BETA, FIRST, FIRST_BACK, LAST, LAST_BACK, name_strand
from dhelix.passes.analysis.work import is_layer_loop, loop_work
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, graph
from dhelix.passes.hlo.edit import copy_instructions, drop_dead
from dhelix.passes.hlo.loop_state import bounded_condition, split
from dhelix.passes.hlo.stacks import is_empty, last_reader, resize, resized, slot_reads, slot_write
from dhelix.passes.strands.forward_backward_cut import Partition, partition
from dhelix.passes.strands.gradients.gradient_accumulation import accumulate
from dhelix.passes.strands.microbatch_loops import partitions
from dhelix.passes.strands.strand_duplication import emit_shared, hand_over

Copies = dict[Instruction, Instruction]


@dataclass(frozen=True)
class StrandSkew:
    """Skews the strands of each loop over micro-batches.

    Attributes:
      skew: the number k of layers of the next micro-batch that an iteration also runs; at least 1.
    """

    skew: int

    name = "strand-skew"
    stage = Stage.LOWERED

    def __post_init__(self) -> None:
        if self.skew < 1:
            raise DhelixError(f"strands cannot be {self.skew} layers apart; give at least 1, or leave the pass out")

    def run(self, module: HloModule, context: PassContext) -> bool:
        """Returns whether the module changed. Raises PassRefusal if the strands of some loop cannot be skewed."""
        refusals: list[PassRefusal] = []
        found = list(partitions(module, refusals))
        if not found:
            return False  # strand_duplication reports the reason
        for computation, parts in found:
            if sum(other is computation for other, _ in found) > 1:
                raise PassRefusal("one computation holds several loops over micro-batches", parts.loop.instruction)
            forward, backward = _loops_over_layers(parts, self.skew)
            body, layers = parts.loop.body, WhileLoop(forward).trip_count
            accumulate(body, context)
            _split(body, forward, backward, self.skew)
            drop_dead(body)
            _start_ahead(computation, parts.loop.instruction)
            context.note("strands are skewed", layers=self.skew, of=layers)
        return True


def _loops_over_layers(parts: Partition, apart: int) -> tuple[Instruction, Instruction]:
    """The forward and the backward layer loop. Raises PassRefusal if they cannot be split at `apart` layers."""
    if parts.trip_count < 3:
        raise PassRefusal(f"strands of {parts.trip_count} micro-batches cannot be skewed; that takes at least 3")
    found = []
    for part in (parts.forward, parts.backward):
        loops = [(i, loop_work(i)) for i in part if i.opcode == "while" and is_layer_loop(i)]
        most = max((work for _, work in loops), default=0)
        large = [i for i, work in loops if work * 4 >= most]
        if len(large) != 1:
            raise PassRefusal(f"skewing strands takes one loop over layers in each pass; there are {len(large)}")
        found += large
    forward, backward = found
    layers, others = WhileLoop(forward).trip_count, WhileLoop(backward).trip_count
    if layers is None or layers != others:
        raise PassRefusal("the loops over layers are not proved to have equal trip counts", forward)
    if layers < 2 * apart:
        raise PassRefusal(f"strands of {layers} layers can be at most {layers // 2} layers apart, not {apart}", forward)
    return forward, backward


def _split(body: Computation, forward: Instruction, backward: Instruction, apart: int) -> None:
    """Splits each layer loop, and each stack of residuals, into the first `apart` layers and the others."""
    layers = WhileLoop(forward).trip_count
    assert layers is not None  # checked by _loops_over_layers
    stacks = _stacks(forward, backward)
    first, last = split(forward, apart, (FIRST, LAST))
    back_last, back_first = split(backward, layers - apart, (LAST_BACK, FIRST_BACK))
    builder = Builder(body)
    for written, read, filler in stacks:
        for ahead, back, slots, passed in ((first, back_first, apart, 0), (last, back_last, layers - apart, apart)):
            resize(ahead, written, resized(builder, filler, slots), -passed)
            resize(back, read, builder.element(ahead, written), -passed)
    body.sort()


def _stacks(forward: Instruction, backward: Instruction) -> list[tuple[int, int, Instruction]]:
    """The stacks of residuals that forward writes from slot 0 upwards and backward reads in the opposite order.

    Returns:
      For each stack, its state element in the forward loop, its state element in the backward loop, and its initial
      value.
    """
    loop = WhileLoop(forward)
    found = []
    for written, filler in enumerate(loop.initial(k) for k in range(loop.size)):
        if filler is None or not is_empty(filler):
            continue
        try:
            write = slot_write(loop, written)
            back, read = last_reader(forward, written)
            reads = slot_reads(back, read)
        except PassRefusal:
            continue  # this stack stays whole, and both forward loops write it
        if back.instruction is not backward or read not in back.invariants:
            continue
        slots = list(range(write.shape.dimensions[0]))
        if loop.index_table(write.operands[2]) == slots:
            if all(back.index_table(r.operands[1]) == slots[::-1] for r in reads):
                found.append((written, read, filler))
    return found


def _start_ahead(computation: Computation, instruction: Instruction) -> None:
    """Replaces the loop by a loop in which each iteration also runs the first layers of the next micro-batch."""
    parts = partition(WhileLoop(instruction))
    if parts is None:
        raise PassRefusal("no backward pass is found after the loops over layers are split", instruction)
    loop = parts.loop
    early = _leading_to_first_layers(parts)
    users = loop.body.users()
    handed = [i for i in early if any(user not in early for user in users[i])]
    rest = [i for i in parts.forward if i not in early] + list(parts.backward)

    def all_but_first_layers(builder: Builder, state: Instruction) -> tuple[Copies, list[Instruction]]:
        """Emits one micro-batch without its first layers.

        Returns the copies of shared instructions (`emit_shared`), and the elements of the new loop state.
        """
        shared = emit_shared(builder, parts, state)
        copies = shared | {value: builder.element(state, loop.size + n) for n, value in enumerate(handed)}
        copy_instructions(builder, rest, copies)
        if builder is outside:
            name_strand(BETA, (copies[i] for i in rest))
        return shared, [copies[value] for value in loop.body.root.operands]

    def first_layers(builder: Builder, shared: Copies, state: list[Instruction]) -> list[Instruction]:
        """Emits the first layers of the micro-batch that starts from `state`. Returns the values that the rest reads.

        The rest is what `all_but_first_layers` emits.
        """
        copies = {i: copy for i, copy in shared.items() if i not in loop.reads}
        copies |= {read: state[k] for read, k in loop.reads.items()}
        copy_instructions(builder, early, copies)
        if builder is outside:
            name_strand(BETA, (copies[i] for i in early))
        return [copies[value] for value in handed]

    outside, inside = Builder(computation), Builder(loop.body.module.new_computation("skewed"))
    start = [outside.element(instruction.operands[0], k) for k in range(loop.size)]
    shared = emit_shared(outside, parts, instruction.operands[0])
    initial = outside.tuple(start + first_layers(outside, shared, start))
    shared, following = all_but_first_layers(inside, inside.parameter(0, initial.shape))
    inside.finish(inside.tuple(following + first_layers(inside, shared, following)))
    condition = bounded_condition(loop, parts.trip_count - 1, initial.shape)
    skewed = outside.while_loop(initial, inside.computation, condition, instruction, "skewed")
    _, result = all_but_first_layers(outside, skewed)
    hand_over(computation, instruction, outside.tuple(result))
    if partition(WhileLoop(skewed)) is None:
        raise PassRefusal("no backward pass is found after the strands are skewed", instruction)


def _leading_to_first_layers(parts: Partition) -> dict[Instruction, None]:
    """F1: the forward instructions up to and including the loop over the first layers, in instruction order."""
    body = parts.loop.body
    first = [i for i in parts.forward if i.name.startswith(FIRST)]
    needed = graph.ancestors(body, first)
    needed |= {i for i in parts.forward if i.opcode == "get-tuple-element" and i.operands[0] in needed}
    return dict.fromkeys(i for i in parts.forward if i in needed)
