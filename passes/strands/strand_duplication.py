"""Makes two strands of a loop over micro-batches: a backward pass overlaps with the next micro-batch's forward pass.

Before:                                    After:
    while i < M:                               F(0)
      F(i)    forward layers, head             while i < M:
      B(i)    backward layers                    layers l = 0 .. L-1 in one loop:
                                                   B(i-1), layer L-1-l        strand alpha
                                                   F(i),   layer l            strand beta
                                               B(M-1)

Contract
    Consumes  a `while` over micro-batches, anywhere in the module, that `forward_backward_cut` can partition.
              `microbatch_loops` finds the loop and inlines its calls. If micro-batches are unrolled, it first rolls
              them into a loop. The program may make the loop by any function (scan, fori_loop, optax.microbatching).
    Makes     the loop above. Its state is the old state and the values that cross from F(i) to B(i). Independent layer
              loops merge if their trip counts are proved equal (`loop_merging`). This includes nested loops and loops
              inside shard_maps (`manual_merging`). Other loops, such as loops over frozen layers, stay apart but run in
              the same iteration. Independent loops of F(0), such as the loops of a policy and a reference model, merge
              with each other. So do independent loops of B(M-1).
    Keeps     every value that the loop computes. Losses and gradients are equal to the last bit: additions are not
              reordered, and F(i) and B(i) run once per micro-batch.
    Leaves    everything else. If no loop can become two strands, the pass raises PassRefusal with the reason and the
              instruction.

The loop above is `pairing="forward-backward"`, the default. Other values are baselines for comparison. With them, two
micro-batches run in the same direction: an iteration runs F(i), F(i+1), B(i) and B(i+1).
    "forward-forward"       merges the layer loops of F(i) and F(i+1).
    "backward-backward"     merges the layer loops of B(i) and B(i+1).
    "same-direction"        merges both of these pairs.
In these baselines, strand alpha is the earlier micro-batch. If M is odd, the first micro-batch runs alone. The
residuals of both micro-batches are alive at the same time.

Why it is legal: neither B(i-1) nor F(i) reads what the other writes (`forward_backward_cut`, rules 1-3). For the same
reason F(i+1) may run before B(i).
Cost: code for one more forward and one more backward pass, and memory for the crossing values of two micro-batches.
`activation_sharing` then saves the additional memory for residuals.
Names: the name stack gets the prefix `strand_alpha/` (backward) or `strand_beta/` (forward), so profiles show the
strands. F(0) and B(M-1) belong to strand alpha.
Sources: DHelix, sections 3.1 and 4.1 (arXiv 2411.15871), and docs/design/strands.md.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.analysis.names import ALPHA, BETA, SKEWED, STRANDS, name_strand
from dhelix.passes.analysis.work import is_layer_loop
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, WhileLoop, graph, shapes
from dhelix.passes.hlo.edit import copy_instructions, drop_dead, replace_all_uses
from dhelix.passes.strands.forward_backward_cut import Partition
from dhelix.passes.strands.loop_merging import loops_of, merge_loops
from dhelix.passes.strands.manual_merging import merge_manual_computations
from dhelix.passes.strands.microbatch_loops import partitions
from dhelix.passes.strands.microbatches.why_no_loop import no_loop

PAIRINGS = ("forward-backward", "forward-forward", "backward-backward", "same-direction")
Copies = dict[Instruction, Instruction]


@dataclass(frozen=True)
class StrandDuplication:
    """Turns loops over micro-batches into two strands.

    Attributes:
      merge_layers: whether layer loops merge. If not, one iteration still holds both strands.
      pairing: which passes of two micro-batches run together, one of PAIRINGS.
    """

    merge_layers: bool = True
    pairing: str = "forward-backward"

    name = "strand-duplication"
    stage = Stage.LOWERED

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise DhelixError(f"pairing={self.pairing!r} is unknown; take one of {', '.join(PAIRINGS)}")

    def run(self, module: HloModule, context: PassContext) -> bool:
        """Returns True: at least one loop became two strands. Raises PassRefusal if no loop can become two strands."""
        if any(f"{ALPHA}/" in i.op_name for i in graph.walk(module.entry)):
            raise PassRefusal("the program already has two strands; give the step before it was interleaved")
        refusals: list[PassRefusal] = []
        done = False
        for computation, parts in partitions(module, refusals):
            self._apply(computation, parts, context)
            done = True
        if done:
            for refusal in refusals:
                context.note(refusal.reason, refusal.instruction)
            return True
        raise refusals[0] if refusals else no_loop(module)

    def _apply(self, computation: Computation, parts: Partition, context: PassContext) -> None:
        loop = parts.loop
        if self.pairing == "forward-backward":
            body, forward, backward = _co_executed_body(parts)
            together, replace = [(forward, backward)], _replace_loop
            for name, part in (("forward", parts.forward), ("backward", parts.backward)):
                if self.merge_layers and not _has_layer_loop(part):
                    context.note(f"no layer loops merged: {_why_none(name, parts)}")
        else:
            body, together = _same_direction_body(parts, self.pairing)
            replace = _replace_loop_by_pairs
        merged: list[str] = []
        for beta, alpha in together if self.merge_layers else ():
            merged += merge_loops(body.computation, _among(beta), _among(alpha), context)
            merged += merge_manual_computations(body.computation, beta.values(), alpha.values(), context)
        alone = replace(computation, parts, body)
        skewed = any(i.name.startswith(SKEWED) for i in loops_of(computation))
        if self.merge_layers and not skewed:
            at_ends = [merge_loops(computation, _left(computation, copies), (), context) for copies in alone]
            if any(at_ends):
                context.note("loops of a micro-batch that runs alone are merged", loops=list(chain(*at_ends)))
        context.note(
            "two strands",
            loop.instruction,
            microbatches=parts.trip_count + skewed,  # a skewed loop has one iteration less
            forward_instructions=len(parts.forward),
            backward_instructions=len(parts.backward),
            merged_loops=merged,
            crossing_values=len(parts.crossing),
            crossing_bytes=sum(shapes.byte_size(v.shape) for v in parts.crossing),
        )


def _co_executed_body(parts: Partition) -> tuple[Builder, Copies, Copies]:
    """Makes the new loop body, which runs forward(i) and backward(i-1).

    Returns the body's builder, and two maps from old instructions to their copies: first the map of forward, then the
    map of backward. Shared instructions are in neither map, because they belong to no strand.
    """
    loop = parts.loop
    builder = Builder(loop.body.module.new_computation("strands"))
    old = loop.instruction.shape.tuple_shapes
    state = builder.parameter(0, shapes.tuple_of([*old, *(v.shape for v in parts.crossing)]))
    common = emit_shared(builder, parts, state)
    backward = _emit_backward(builder, parts, common, state)
    forward = _emit_forward(builder, parts, common, BETA)
    builder.finish(builder.tuple(_results(parts, forward, backward)))
    of_forward, of_backward = ({i: copies[i] for i in copies if i not in common} for copies in (forward, backward))
    return builder, of_forward, of_backward


def _results(parts: Partition, forward: Copies, backward: Copies) -> list[Instruction]:
    """The new loop state after an iteration: the old state, then the crossing values."""
    roots = enumerate(parts.loop.body.root.operands)
    state = [(backward if k in parts.written_by_backward else forward)[value] for k, value in roots]
    return state + [forward[value] for value in parts.crossing]


def emit_shared(builder: Builder, parts: Partition, state: Instruction) -> Copies:
    """Copies the instructions that depend on loop invariants only (`Partition.shared`), and the reads of loop state.

    The copies read the elements of the tuple `state`.

    Returns:
      A map from the old instructions to their copies.
    """
    copies = {read: builder.element(state, k) for read, k in parts.loop.reads.items()}
    copy_instructions(builder, parts.shared, copies)
    return copies


def _emit_forward(builder: Builder, parts: Partition, common: Copies, strand: str) -> Copies:
    copies = dict(common)
    copy_instructions(builder, parts.forward, copies)
    name_strand(strand, (copies[i] for i in parts.forward))
    return copies


def _emit_backward(builder: Builder, parts: Partition, common: Copies, state: Instruction) -> Copies:
    """Emits the backward part. The crossing values that it reads are the last elements of `state`."""
    first = parts.loop.size
    copies = dict(common)
    for n, value in enumerate(parts.crossing):
        copies[value] = builder.element(state, first + n)
    again = [i for i in parts.recomputed if i not in copies]
    copy_instructions(builder, again, copies)
    copy_instructions(builder, parts.backward, copies)
    name_strand(ALPHA, (copies[i] for i in (*again, *parts.backward)))
    return copies


def _replace_loop(computation: Computation, parts: Partition, body: Builder) -> list[Copies]:
    """Replaces the old loop by F(0), the loop over the new body, and B(M-1). Returns the copies of F(0) and B(M-1)."""
    loop = parts.loop
    old = loop.instruction
    builder = Builder(computation)
    initial = old.operands[0]
    common = emit_shared(builder, parts, initial)
    forward = _emit_forward(builder, parts, common, ALPHA)
    elements = []
    for k, value in enumerate(loop.body.root.operands):
        elements.append(builder.element(initial, k) if k in parts.written_by_backward else forward[value])
    start = builder.tuple(elements + [forward[v] for v in parts.crossing])
    condition = _widen_condition(loop, start)
    strands = builder.while_loop(start, body.computation, condition, old, STRANDS)
    common = emit_shared(builder, parts, strands)
    backward = _emit_backward(builder, parts, common, strands)
    result = [
        backward[value] if k in parts.written_by_backward else builder.element(strands, k)
        for k, value in enumerate(loop.body.root.operands)
    ]
    hand_over(computation, old, builder.tuple(result))
    return [forward, backward]


def _widen_condition(loop: WhileLoop, start: Instruction) -> Computation:
    """A copy of the loop's condition that takes the longer state `start`."""
    builder = Builder(loop.body.module.new_computation("strands_condition"))
    copies = {loop.condition.parameters[0]: builder.parameter(0, start.shape)}
    copy_instructions(builder, loop.condition.instructions, copies)
    return builder.finish(copies[loop.condition.root])


def hand_over(computation: Computation, old: Instruction, result: Instruction) -> None:
    """Makes readers of the old loop read the elements of the tuple `result`, and removes the old loop."""
    reads = [user for user in computation.users()[old] if user.opcode == "get-tuple-element"]
    replace_all_uses(computation, {old: result} | {read: result.operands[read.tuple_index] for read in reads})
    computation.instructions = [i for i in computation.instructions if i is not old]
    computation.sort()
    drop_dead(computation)


def _same_direction_body(parts: Partition, pairing: str) -> tuple[Builder, list[tuple[Copies, Copies]]]:
    """Makes a loop body that runs two micro-batches in the same direction.

    Returns the body's builder, and two maps for each pass (forward or backward) whose loops are to be merged. The maps
    lead from the pass's old instructions to their copies. The first map of a pair is for the later micro-batch, the
    second map for the earlier one.
    """
    loop = parts.loop
    builder = Builder(loop.body.module.new_computation("strands"))
    parameter = builder.parameter(0, loop.instruction.shape)
    state = [builder.element(parameter, k) for k in range(loop.size)]
    first = _micro_batch(builder, parts, state, ALPHA)
    second = _micro_batch(builder, parts, [first[value] for value in loop.body.root.operands], BETA)
    results = [state[k] if k in loop.invariants else second[v] for k, v in enumerate(loop.body.root.operands)]
    builder.finish(builder.tuple(results))
    passes = {"forward-forward": [parts.forward], "backward-backward": [parts.backward]}
    together = passes.get(pairing, [parts.forward, parts.backward])
    return builder, [({i: second[i] for i in part}, {i: first[i] for i in part}) for part in together]


def _micro_batch(builder: Builder, parts: Partition, state: list[Instruction], strand: str) -> Copies:
    """Emits a copy of one iteration of the old loop. The copy starts from the state elements `state`.

    Returns a map from old instructions to their copies.
    """
    copies = {read: state[k] for read, k in parts.loop.reads.items()}
    copy_instructions(builder, parts.shared, copies)
    own = (*parts.forward, *parts.backward)
    copy_instructions(builder, own, copies)
    name_strand(strand, (copies[i] for i in own))
    return copies


def _replace_loop_by_pairs(computation: Computation, parts: Partition, body: Builder) -> list[Copies]:
    """Replaces the old loop by a loop over pairs of micro-batches. If M is odd, the first micro-batch runs before it.

    Returns a list that holds the copies of the micro-batch that runs before the loop. If M is even, it is empty.
    """
    loop = parts.loop
    old, start = loop.instruction, loop.instruction.operands[0]
    builder = Builder(computation)
    alone: list[Copies] = []
    if parts.trip_count % 2:
        first = _micro_batch(builder, parts, [builder.element(start, k) for k in range(loop.size)], ALPHA)
        start = builder.tuple([first[value] for value in loop.body.root.operands])
        alone.append(first)
    strands = builder.while_loop(start, body.computation, loop.condition, old, STRANDS)
    hand_over(computation, old, builder.tuple([builder.element(strands, k) for k in range(loop.size)]))
    return alone


def _among(copies: Copies) -> list[Instruction]:
    return [i for i in dict.fromkeys(copies.values()) if i.opcode == "while"]


def _has_layer_loop(part: Collection[Instruction]) -> bool:
    """Whether the instructions of `part`, or the computations that they call, hold a loop over layers."""
    inside = chain.from_iterable(graph.walk(called) for i in part for called in i.called)
    return any(i.opcode == "while" and is_layer_loop(i) for i in chain(part, inside))


def _why_none(name: str, parts: Partition) -> str:
    """The reason why the part `name` has no layer loop, and what to do."""
    if _has_layer_loop(parts.shared):
        return (
            "a loop over layers computes the same for every micro-batch; pass the batch to the loss as an argument, "
            "instead of capturing it"
        )
    return f"the {name} pass has no loop over its layers"


def _left(computation: Computation, copies: Copies) -> list[Instruction]:
    """The loops among `copies` that are still in `computation`."""
    made = set(_among(copies))
    return [i for i in computation.instructions if i in made]
