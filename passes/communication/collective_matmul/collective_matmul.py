"""Replaces collectives next to matrix products by collective matmuls.

Before:                                      After, if a ring is faster:
    g = bf16[8192,4096] all-gather(x)            p = collective-permute(x)
    y = bf16[8192,3584] dot(g, w)                y0 = dot(x, w)
    z = bf16[8192,3584] dot(g, v)                ... dot(p, w) while the next part is sent, and so on
                                                 y, z: their parts, put together

Contract
    Consumes  a partitioned program with synchronous collectives. On GPUs, a program has this form at the stage
              PRE_SCHEDULER: after partitioner and simplifiers, before layouts and fusion. At the stage LOWERED, on any
              backend, a program has only the collectives of shard_map.
    Makes     a program in place of each match (`sites.py`, `splicing.py`). The program has the form that `forms`
              chooses, such as a ring. The monolithic form leaves a match as it is.
    Leaves    everything else, with one note for each reason. If nothing is replaced, the module is unchanged.

Why it is legal: the replacement computes the same products of the same rows; sums over devices may round in another
order. Other users of the gathered array read the copy that the replacement assembles. Collectives and products with
control predecessors are left alone.

New instructions have `collective_matmul` in their name stack, and the pass never matches such instructions. So a second
run changes nothing, and matmuls that the user wrote with `dhelix.runtime.collective_matmul` stay.

Cost: one lowering by JAX for each distinct pattern and form. MegaScale ("Scaling Large Language Model Training to More
Than 10,000 GPUs") section 3.2 and DistFuse section 3 describe the forms; docs/design/collective_matmul.md says when
each form is faster.
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

PARTLY_MANUAL = "the compiler shards some mesh axes of the program and has not partitioned it yet"


class Forms(Protocol):
    """Chooses the form of a collective matmul and makes its HLO.

    Implementations are frozen dataclasses, because they are options of a pass. Both methods raise DhelixError if a form
    is not available.
    """

    def choose(self, placed: Placed) -> Form:
        """The form that replaces collective and matmul. The monolithic form leaves them unchanged."""
        ...

    def program(self, pattern: Pattern, form: Form) -> HloModule:
        """The form's module for one device, prepared by `splicing.prepare`. Equal arguments may return the same object.

        For a gather, the module's entry takes x and then each w. It returns the product with each w, followed by the
        gathered x if `pattern.gathered`. For other kinds, the entry takes x and w of each product in turn. It returns
        the sum of the products, reduced over devices.
        """
        ...


@dataclass(frozen=True)
class CollectiveMatmul:
    """Replaces collectives and their matrix products by collective matmuls.

    Attributes:
      forms: chooses and makes the form of each site (`dhelix.runtime.step.collective_matmuls.jax_forms`).
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
        """The form that replaces a match of `placed`, with its program; None if the match stays.

        Counts a replacement in `made`, and the reason why a match stays in `left`.
        """
        try:
            form = self.forms.choose(placed)
        except DhelixError as error:  # the requested form may not be available at every site
            left[str(error)] += 1
            return None
        if form.name == MONOLITHIC.name:
            left["no collective matmul is known to be faster"] += 1
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
    """Executed computations, each with the matches that can be replaced together.

    Counts in `left` why other collectives stay. The caller may change a computation before it asks for the next
    computation.
    """
    for computation in list(executed(module.entry)):
        found = list(find(computation))
        left.update(reason for reason in found if isinstance(reason, str))
        matches = _without_overlap([match for match in found if isinstance(match, Match)], left)
        co_executed = co_executes(computation)
        yield computation, [(match, Placed(match.pattern, co_executed)) for match in matches]


def executed(entry: Computation) -> Iterator[Computation]:
    """Yields each computation whose instructions run one by one. Each comes only once.

    Callees of composites are not included.
    """
    for visit in visits(entry, once(lambda control: () if control.proto.is_composite else entered(control))):
        yield visit.computation


def _without_overlap(matches: list[Match], left: Counter[str]) -> list[Match]:
    """The matches, gathers first. A match that shares a product with an earlier match is left out."""
    taken: list[Match] = []
    used: set[Instruction] = set()
    for match in sorted(matches, key=lambda m: m.collective.opcode):  # "all-gather" sorts first
        dots = {p.dot for p in match.products}
        if used & dots:
            left["another collective already uses its product"] += 1
        else:
            used |= dots
            taken.append(match)
    return taken


def _splice(match: Match, form: Form, program: HloModule, splicer: Splicer) -> dict[Instruction, Instruction]:
    """Appends `program` with the operands of `match`. Returns a map from replaced instructions to replacements."""
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
    """Replaces operands and control predecessors by their values in `stands_for`, and removes the keys."""
    for instruction in computation.instructions:
        predecessors = instruction.control_predecessors
        if any(p in stands_for for p in predecessors):
            instruction.control_predecessors = [stands_for.get(p, p) for p in predecessors]
    replace_all_uses(computation, stands_for)
    drop_dead(computation)


def _operand(builder: Builder, match: Match, product: Product) -> Instruction:
    """The array x of a product, in the type that is multiplied. For a gather, x is the gather's operand."""
    if match.collective.opcode == "all-gather":
        value = match.collective.operands[0]
    else:
        value = product.dot.operands[product.x]
    if value.shape.element_type != match.kind:
        value = builder.make("convert", dense(match.kind, value.shape.dimensions), [value])
    return product.order_x.emit(builder, value)


def _is_partly_manual(module: HloModule) -> bool:
    """Whether a shard_map leaves mesh axes to the compiler. Arrays in it are then larger than one device's part."""
    attributes = module.proto.frontend_attributes.map
    axes = set(re.findall(r'"([^"]+)"=\d+', attributes.get("xla.sdy.meshes", "")))
    manual = (i.proto.frontend_attributes.map.get("xla.sdy.manual_axes") for i in graph.walk(module.entry))
    return any(set(re.findall(r'"([^"]+)"', found)) < axes for found in manual if found is not None)
