"""Planned order: gives a program the order that a plan holds, if the plan fits the program.

    plan    beta all-gather 1, alpha wgrad 1, beta gemm
    order   slice, all-gather-start, wgrad, dynamic-update-slice (of wgrad), all-gather-done, gemm

Contract
    Consumes  scheduled computations that match a body of the plan: they have its fingerprint
              (`PlanOperators.fingerprint`). A body applies to every computation that matches it. The program must have
              the first body. Other bodies may be missing: in a program with more layers, some operators have other
              sizes.
    Makes     the same instructions in another order. Operators have the order of the plan. Small instructions
              (`PlanBody.small`) come before the operator that the plan names, or later, as soon as they are ready.
              Other instructions come right before the first operator that needs them. So collectives end as late as
              possible. An instruction that no operator needs comes as early as possible, so that its operands do not
              live longer than necessary.
    Leaves    other computations in XLA's order. If the plan is refused, the whole module keeps XLA's order. With
              `strict`, the pass raises an error instead.

Why it is legal: data flow, control dependencies, the order of side effects and the order of accesses to shared buffers
are kept (`order_rules.dependencies`). A plan that contradicts them or exceeds the memory limit is refused. At least one
computation that matches a body must follow the plan exactly. Other computations that match it may share buffers
differently. If an operator must come earlier there than in the plan, it does, and a note says so.

Cost: linear in the number of instructions. The pass searches nothing and reads no costs, so one plan always gives the
same order.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.analysis.collectives import is_done
from dhelix.passes.evaluation.operator_keys import OperatorKeys
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.framework.units import bytes_option, bytes_text
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.ordering.order_rules import MEMORY_SLACK, MemoryRefusal, predecessors
from dhelix.passes.plans.plan import FINALLY, Plan, PlanBody
from dhelix.passes.plans.plan_operators import END, PlanOperators, is_work
from dhelix.profiles.hardware import describe

_AGAIN = "make a plan for it with `dhelix plan`"


@dataclass(frozen=True)
class PlannedOrder:
    """The pass that gives a program the order of a plan.

    Attributes:
      plan: the plan.
      memory_limit: limit in bytes per GPU, arguments included. A plan that needs more is refused. If None, the limit is
        the plan's own limit or the memory of XLA's order plus the slack, whichever is more.
      memory_slack: the slack, as a fraction of the memory that XLA's order needs in addition to the arguments.
    """

    plan: Plan
    memory_limit: int | None = None
    memory_slack: float = MEMORY_SLACK

    name = "planned-order"
    stage = Stage.POST_SCHEDULER

    def run(self, module: HloModule, context: PassContext) -> bool:
        memory = Memory(module)
        before = memory.needed(module)
        original = dict(module.schedule)
        found: dict[str, Collection[str]] = {}
        refused: list[tuple[PassRefusal, PlanBody, Computation, PlanOperators]] = []
        for body, computation, operators in find_bodies(self.plan, module):
            try:
                found[body.fingerprint] = self._order(module, body, computation, operators, memory, context)
            except PassRefusal as refusal:
                refused.append((refusal, body, computation, operators))
        for refusal, body, computation, operators in refused:
            if body.fingerprint not in found:
                raise PassRefusal(f"body {body.name!r}: {refusal.reason}", refusal.instruction, **refusal.facts)
            self._order(module, body, computation, operators, memory, context, refusal)
        self._check_complete(found, context)
        memory.forget()
        self._check_memory(memory.needed(module), before + int((before - memory.arguments) * self.memory_slack))
        return any(module.schedule[c] != order for c, order in original.items())

    def _order(
        self,
        module: HloModule,
        body: PlanBody,
        computation: Computation,
        operators: PlanOperators,
        memory: Memory,
        context: PassContext,
        refusal: PassRefusal | None = None,
    ) -> Collection[str]:
        """Orders one computation and returns the names of its operators.

        Without `refusal`, raises PassRefusal if the plan's exact order is illegal here. `refusal` says why the exact
        order is illegal; then operators come earlier than in the plan where they must.
        """
        heads, sequence = heads_of(body, operators), module.schedule[computation]
        small = _small(body, operators)
        ordered = planned_sequence(computation, sequence, heads, memory, small, exactly=refusal is None)
        verify_sequence(computation, ordered)
        module.schedule[computation] = ordered
        facts = {"computation": computation.name, "body": body.name, "operators": len(heads)}
        if refusal is None:
            context.note("ordered as planned", **facts)
        else:
            context.note(
                f"ordered as planned, except for operators that must come first here: {refusal.reason}", **facts
            )
        return heads.values()

    def _check_complete(self, heads: Mapping[str, Collection[str]], context: PassContext) -> None:
        """Notes the bodies and operators that the program lacks. Raises PassRefusal under `strict`.

        `heads` maps the fingerprint of each body in the program to the names of its operators that were found.
        """
        bodies = [body.name for body in self.plan.bodies if body.fingerprint not in heads]
        operators = [
            name for b in self.plan.bodies for name in b.order if name not in heads.get(b.fingerprint, b.order)
        ]
        if (bodies or operators) and context.strict:
            missing = f"body {bodies[0]!r}" if bodies else f"{operators[0]!r}"
            raise PassRefusal(f"the program lacks the plan's {missing}: correct the plan's operators, or {_AGAIN}")
        if bodies or operators:
            context.note("parts of the plan are not in this program", bodies=bodies, operators=operators)

    def _check_memory(self, needed: int, usual: int) -> None:
        limit = self.memory_limit
        if limit is None:
            limit = max(usual, self.plan.order.memory_limit)
        if needed > limit:
            raise MemoryRefusal(
                f"the plan needs about {bytes_text(needed)}, arguments included, but {bytes_text(limit)} are allowed: "
                f"give memory_limit={bytes_option(needed)!r} or more, or a plan that needs less",
                needed,
            )


def find_bodies(plan: Plan, module: HloModule) -> list[tuple[PlanBody, Computation, PlanOperators]]:
    """The computations of `module` that match a body of the plan, each with this body and its own operators.

    Raises:
      PassRefusal: no computation matches the first body of the plan.
    """
    target = plan.target
    hardware = describe(target.hardware, target.link, target.gpus_per_node)
    keys = OperatorKeys(hardware.gpus_per_node, target.implementation)
    wanted = {body.fingerprint: body for body in plan.bodies}
    found = [
        (wanted[operators.fingerprint], computation, operators)
        for computation in module.computations
        if computation in module.schedule and (operators := PlanOperators(computation, keys)).fingerprint in wanted
    ]
    if plan.bodies and all(body is not plan.bodies[0] for body, _, _ in found):
        raise PassRefusal(
            f"the plan is for another program ({plan.program}): this one lacks its body {plan.bodies[0].name!r};"
            f" {_AGAIN}"
        )
    return found


def heads_of(body: PlanBody, operators: PlanOperators) -> dict[Instruction, str]:
    """The instructions of the body's operators, in the body's order, with their names in the plan.

    A fusion or copy may be missing in the program, because sizes and fusion decisions depend on the number of layers
    and on the compiler. Then it is left out.

    Raises:
      PassRefusal: the program lacks an operator that is neither a fusion nor a copy.
    """
    of_name = {o.name: o for o in body.operators}
    heads = {}
    for name in body.order:
        operator = of_name[name]
        instruction = operators.instructions.get((operator.key, operator.occurrence))
        if instruction is not None:
            heads[instruction] = name
        elif is_work(operator.key.removeprefix(END)):
            count = sum(key == operator.key for key, _ in operators.instructions)
            what = f"only {count} of these" if count else "none of these"
            raise PassRefusal(
                f"the plan's {name!r} is occurrence {operator.occurrence} of {operator.key!r}, but the body "
                f"{body.name!r} of the program has {what}: correct the plan's operators, or {_AGAIN}"
            )
    return heads


def _small(body: PlanBody, operators: PlanOperators) -> dict[str, list[Instruction]]:
    """The body's small instructions, by the name of the operator before which they run.

    Small instructions that the program lacks are left out. Another compiler may have fused them differently.
    """
    found = {}
    for name, identities in body.small:
        instructions = (operators.instructions.get(identity) for identity in identities)
        found[name] = [i for i in instructions if i is not None]
    return found


def planned_sequence(
    computation: Computation,
    sequence: Sequence[Instruction],
    heads: Mapping[Instruction, str],
    memory: Memory,
    small: Mapping[str, Sequence[Instruction]] = MappingProxyType({}),
    exactly: bool = True,
) -> list[Instruction]:
    """All instructions of `computation`, with `heads` in their given order.

    Args:
      computation: a scheduled computation.
      sequence: a legal order of all its instructions.
      heads: operators in the wanted order, with their names in the plan.
      memory: the module's buffers.
      small: for the name of an operator, the instructions to place before this operator, or later if they are not ready
        there. Instructions that are not in `small` come when they are needed.
      exactly: whether the order of `heads` must be kept exactly. If not, an operator comes earlier if it must.

    Raises:
      PassRefusal: with `exactly`, if the order of two operators in `heads` is illegal.
    """
    before = predecessors(computation, sequence, memory)
    placed = {i for instructions in small.values() for i in instructions}
    layer = _Layer(before, _trailing(sequence, before, heads) - placed)
    needs = _needs(sequence, before, heads)
    turn = {head: n for n, head in enumerate(heads)}
    waiting: list[Instruction] = []
    for number, (head, name) in enumerate(heads.items()):
        waiting += small.get(name, ())
        for instruction in [i for i in waiting if needs[i] <= layer.laid.keys()]:
            waiting.remove(instruction)
            layer.lay(instruction)
        for instruction in layer.lay(head):
            if exactly and turn.get(instruction, -1) > number:
                raise PassRefusal(
                    f"the plan runs {name!r} before {heads[instruction]!r}, which must come first: move one of"
                    " them, or make the plan again with `dhelix plan`"
                )
    for instruction in (*waiting, *small.get(FINALLY, ()), *sequence):
        layer.lay(instruction)
    return list(layer.laid)


def _needs(
    sequence: Sequence[Instruction], before: Mapping[Instruction, Sequence[Instruction]], heads: Collection[Instruction]
) -> dict[Instruction, frozenset[Instruction]]:
    """The operators that each instruction waits for, directly or through instructions that are not operators."""
    found: dict[Instruction, frozenset[Instruction]] = {}
    for instruction in sequence:
        direct = (frozenset((b,)) if b in heads else found[b] for b in before[instruction])
        found[instruction] = frozenset().union(*direct)
    return found


def _trailing(
    sequence: Sequence[Instruction], before: dict[Instruction, list[Instruction]], heads: Iterable[Instruction]
) -> set[Instruction]:
    """The instructions that no operator needs, directly or through other instructions, except ends of collectives."""
    needed = set(heads)
    for instruction in reversed(sequence):
        if instruction in needed:
            needed.update(before[instruction])
    return {i for i in sequence if i not in needed and not is_done(i)}


class _Layer:
    """Builds an order: `laid` has the instructions that are placed so far, each after its predecessors `before`.

    An instruction in `trailing` is placed as soon as its predecessors are placed.
    """

    def __init__(self, before: dict[Instruction, list[Instruction]], trailing: set[Instruction]) -> None:
        self.before, self.trailing = before, trailing
        self.laid: dict[Instruction, None] = {}
        self.waits_for = {i: len(before[i]) for i in trailing}
        self.followers: dict[Instruction, list[Instruction]] = {}
        for instruction in before:
            if instruction in trailing:
                for earlier in before[instruction]:
                    self.followers.setdefault(earlier, []).append(instruction)

    def lay(self, instruction: Instruction) -> list[Instruction]:
        """Places the predecessors of `instruction` that are not placed yet, then `instruction` itself.

        Returns the newly placed instructions.
        """
        stack, new = [instruction], []
        while stack:
            current = stack[-1]
            missing = [b for b in self.before[current] if b not in self.laid]
            if missing:
                stack += reversed(missing)
            elif stack.pop() not in self.laid:
                new += self._place(current)
        return new

    def _place(self, instruction: Instruction) -> list[Instruction]:
        """Places `instruction`, and then the trailing instructions that are ready because of it. Returns them all."""
        placed = [instruction]
        for current in placed:
            self.laid[current] = None
            for follower in self.followers.get(current, ()):
                self.waits_for[follower] -= 1
                if not self.waits_for[follower]:
                    placed.append(follower)
        return placed
