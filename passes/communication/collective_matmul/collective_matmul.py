"""Puts collective matmuls in the place of collectives that stand beside matrix products.

Before:                                      After, where a ring pays:
    g = bf16[8192,4096] all-gather(x)            p = collective-permute(x)
    y = bf16[8192,3584] dot(g, w)                y0 = dot(x, w)
    z = bf16[8192,3584] dot(g, v)                ... dot(p, w) while the next part travels, and so on
                                                 y, z: their parts, put together

Contract
    Consumes  a partitioned program: plain collectives, before they are asynchronous. PRE_SCHEDULER is the place on
              GPUs: after partitioner and simplifiers, before layouts and fusion. At LOWERED, on any backend, it is the
              collectives of shard_map alone.
    Makes     of each match (`sites.py`) for which `forms` chooses another form than the
              monolithic one the program that it has for it, spliced in (`splicing.py`).
    Leaves    everything else, with one note for each reason. Where nothing is replaced, the module is untouched.

Why it is legal: the replacement computes the same products of the same rows; sums over devices may be rounded in
another order. What else read the gathered array reads the one that the replacement has put together. Nothing but data
flow ties what is replaced: collectives and products that the program orders otherwise are left.

What is made carries `collective_matmul` in its name stack, and what carries that is never matched: not in a second run,
nor what the user wrote with `dhelix.runtime.collective_matmul`.

Cost: one lowering by JAX for each pattern and form that differ. MegaScale section 3.2 and DistFuse section 3 say what
such forms are; docs/collective_matmul.md when they pay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from dhelix.errors import DhelixError
from dhelix.passes.analysis.dimension_factors import dense
from dhelix.passes.analysis.execution import entered, once, visits
from dhelix.passes.communication.collective_matmul.pattern import Match, Pattern, Placed, Product, co_executes
from dhelix.passes.communication.collective_matmul.sites import find
from dhelix.passes.communication.collective_matmul.splicing import Splicer
from dhelix.passes.evaluation.collective_matmul_kernels import named
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, Instruction, graph
from dhelix.passes.hlo.edit import drop_dead, replace_all_uses
from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form

PARTLY_MANUAL = "the program is partly sharded by the compiler, and not partitioned yet"


class Forms(Protocol):
    """Which form a collective matmul takes, and what it is in HLO. A frozen dataclass, for it is an option of a pass.

    Both methods raise DhelixError where a form cannot be had.
    """

    def choose(self, placed: Placed) -> Form:
        """The form that takes the place of collective and matmul; the monolithic one leaves them as they are."""
        ...

    def program(self, pattern: Pattern, form: Form) -> HloModule:
        """A module for one device, prepared by `splicing.prepare`; it may be the same object for the same arguments.

        Its entry takes x and w of each product, one after the other, for a gather x once and each w; it returns a tuple
        with the result of each weight, and the gathered x where the pattern wants it.
        """
        ...


@dataclass(frozen=True)
class CollectiveMatmul:
    """Collective matmuls in place of collective and matmul.

    Attributes:
      forms: says which form each site takes, and makes it (`dhelix.runtime.step.collective_matmuls.jax_forms`).
      stage: PRE_SCHEDULER, or LOWERED for programs under shard_map.
    """

    forms: Forms
    stage: Stage = Stage.PRE_SCHEDULER

    name = "collective-matmul"

    def run(self, module: HloModule, context: PassContext) -> bool:
        if module.is_scheduled:
            context.note("left alone: the module is scheduled")
            return False
        if self.stage is Stage.LOWERED and _is_partly_manual(module):
            context.note(f"left alone: {PARTLY_MANUAL}")
            return False
        left, made = Counter[str](), Counter[tuple[str, str]]()
        splicer = Splicer(module)
        for computation, matches in find_all(module, left):
            stands_for: dict[Instruction, Instruction] = {}
            for match, placed in matches:
                found = self._program(placed, left, made, context.strict)
                if found is not None:
                    stands_for.update(_splice(match, *found, splicer))
            if stands_for:
                _put_in_place(computation, stands_for)
        context.left_alone(left)
        for (site, form), count in sorted(made.items()):
            context.note("a collective matmul", site=site, form=form, count=count)
        return bool(made)

    def _program(
        self, placed: Placed, left: Counter[str], made: Counter[tuple[str, str]], strict: bool
    ) -> tuple[Form, HloModule] | None:
        """What takes the place of a pattern's matches; None where nothing does, and why not is counted."""
        try:
            form = self.forms.choose(placed)
        except DhelixError as error:  # not every site can have the form that was asked for
            left[str(error)] += 1
            return None
        if form.name == MONOLITHIC.name:
            left["no other form is known to be faster"] += 1
            return None
        try:
            program = self.forms.program(placed.pattern, form)
        except DhelixError as error:
            if strict:
                raise
            left[str(error)] += 1
            return None
        made[placed.key, form.key] += 1
        return form, program


def find_all(module: HloModule, left: Counter[str]) -> Iterator[tuple[Computation, list[tuple[Match, Placed]]]]:
    """Computations that run, and what of each could be replaced at once; why the rest could not is counted in `left`.

    A computation may be changed when the next one is asked for.
    """
    for computation in list(executed(module.entry)):
        found = list(find(computation))
        left.update(reason for reason in found if isinstance(reason, str))
        matches = _without_overlap([match for match in found if isinstance(match, Match)], left)
        co_executed = co_executes(computation)
        yield computation, [(match, Placed(match.pattern, co_executed)) for match in matches]


def executed(entry: Computation) -> Iterator[Computation]:
    """The computations whose instructions run one by one, each once: not those of composites."""
    for visit in visits(entry, once(lambda control: () if control.proto.is_composite else entered(control))):
        yield visit.computation


def _without_overlap(matches: list[Match], left: Counter[str]) -> list[Match]:
    """The matches, gathers first, without those that hold a product of one before."""
    taken: list[Match] = []
    used: set[Instruction] = set()
    for match in sorted(matches, key=lambda m: m.collective.opcode):  # all-gather is the first of the alphabet
        dots = {p.dot for p in match.products}
        if used & dots:
            left["its product belongs to another one"] += 1
        else:
            used |= dots
            taken.append(match)
    return taken


def _splice(match: Match, form: Form, program: HloModule, splicer: Splicer) -> dict[Instruction, Instruction]:
    """Appends `program` on the operands of `match`. Returns what stands for each instruction that is replaced."""
    computation = match.collective.computation
    builder = Builder(computation)
    start = len(computation.instructions)
    arguments: list[Instruction] = []
    for product in match.products:
        if not arguments or match.collective.opcode != "all-gather":
            arguments.append(_operand(builder, match, product))
        order_w = product.turned_w if match.pattern.transposed else product.order_w
        arguments.append(order_w.emit(builder, product.w))
    stack = named(match.collective.op_name, match.pattern.site, form)
    results = splicer.import_entry(program, computation, arguments, stack)
    placed = [order.emit(builder, new) for order, new in zip(match.results, results, strict=True)]
    for made in computation.instructions[start:]:
        if not made.op_name:
            made.proto.metadata.op_name = stack
    return dict(zip(match.replaced, placed, strict=True))


def _put_in_place(computation: Computation, stands_for: Mapping[Instruction, Instruction]) -> None:
    """Whatever reads or waits for the keys, what was spliced in too, does so with what stands for them; they go."""
    for instruction in computation.instructions:
        predecessors = instruction.control_predecessors
        if any(p in stands_for for p in predecessors):
            instruction.control_predecessors = [stands_for.get(p, p) for p in predecessors]
    replace_all_uses(computation, stands_for)
    drop_dead(computation)


def _operand(builder: Builder, match: Match, product: Product) -> Instruction:
    """x of a product, of the type that is multiplied; of a gather what it gathers."""
    if match.collective.opcode == "all-gather":
        value = match.collective.operands[0]
    else:
        value = product.dot.operands[product.x]
    if value.shape.element_type != match.kind:
        value = builder.make("convert", dense(match.kind, value.shape.dimensions), [value])
    return product.order_x.emit(builder, value)


def _is_partly_manual(module: HloModule) -> bool:
    """Whether a shard_map leaves axes to the compiler: devices then hold parts of what they seem to hold."""
    attributes = module.proto.frontend_attributes.map
    axes = set(re.findall(r'"([^"]+)"=\d+', attributes.get("xla.sdy.meshes", "")))
    manual = (i.proto.frontend_attributes.map.get("xla.sdy.manual_axes") for i in graph.walk(module.entry))
    return any(set(re.findall(r'"([^"]+)"', found)) < axes for found in manual if found is not None)
