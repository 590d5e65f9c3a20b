"""Maps operators of a plan to instructions and back, by key and occurrence, and gives them readable names.

A plan is also used for other programs than the one from which it was made. XLA renames instructions in each version and
schedules them differently when costs differ. On each GPU, XLA's autotuner chooses the library for a product. The
computation itself stays the same, so an operator is identified by

  - its key, which has the facts that decide its time (`passes/evaluation/operator_keys.py`). For a product, a plan uses
    only operand types, layout and sizes, without library, epilogue and result type. Control flow has no key in a
    profile. It is identified by its opcode and a digest of the collectives, products and attentions inside. Kernels of
    collective matmuls are identified by site and form (`profiles/collective_matmul/sites.py`);
  - its occurrence: its number among the instructions with the same key in the computation. These instructions are
    sorted by depth, then by JAX's name (`op_name`), then by their order in the module. The depth of an instruction is
    the largest number of operators on a path of operands to it. The schedule does not matter.

A readable name has the strand, what the operator does, and a number if there are several: `beta all-gather 2`. The end
of a collective (its done instruction) is named after its start: `beta end of all-gather 2`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b

from dhelix.passes.analysis.collectives import is_done, start_of
from dhelix.passes.analysis.execution import entered
from dhelix.passes.analysis.names import BACKWARD_NAME
from dhelix.passes.evaluation.collective_matmul_kernels import FAMILY, kernel_key
from dhelix.passes.evaluation.operator_keys import OperatorKeys
from dhelix.passes.evaluation.transfers import transfer_key
from dhelix.passes.hlo import Computation, Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.keys import COLLECTIVE_KINDS, CollectiveKey, Key, OperatorKey

END = "end of "
RECOMPUTED = "rematted_computation"
_WORK = {"gemm": "product", "grouped-gemm": "product", "attention": "attention", "attention-backward": "attention"}
_COMPUTED = {
    "gemm": 2,
    "grouped-gemm": 3,
}  # leading parts of a family that say what is computed: types, grouping, layout
_STRANDS = {"strand_alpha/": "alpha", "strand_beta/": "beta"}


class PlanOperators:
    """The operators of one computation.

    Attributes:
      identities: (key, occurrence) of each instruction that takes time, and of each end of a collective. Occurrences
        count from 1.
      instructions: the reverse of `identities`: maps (key, occurrence) to the instruction.
    """

    def __init__(self, computation: Computation, keys: OperatorKeys) -> None:
        self.computation, self._keys = computation, keys
        self._texts = {i: text for i in computation.instructions if (text := operator_text(i, keys))}
        self.identities: dict[Instruction, tuple[str, int]] = {}
        counts: Counter[str] = Counter()
        for instruction in self._in_order():
            text = self._texts[instruction]
            counts[text] += 1
            self.identities[instruction] = text, counts[text]
        for instruction in computation.instructions:
            if is_done(instruction) and start_of(instruction) in self._texts:
                text, occurrence = self.identities[start_of(instruction)]
                self.identities[instruction] = f"{END}{text}", occurrence
        self.instructions = {identity: instruction for instruction, identity in self.identities.items()}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the operators, 16 hex digits: collectives, products, attentions, and control flow that runs these.

        The fingerprint does not depend on the order of these operators or on other instructions.
        """
        counts = Counter(text for i, text in self._texts.items() if self._is_work(i) or self._holds_work(i))
        return blake2b(repr(sorted(counts.items())).encode(), digest_size=8).hexdigest()

    def describe(self) -> str:
        """A short description: `both strands: 8 collectives, 18 products, 2 attentions`."""
        found = [i for i in self._texts if self._is_work(i)]
        strands = {strand for i in found if (strand := _strand_in_name(i))}
        kinds = Counter(_kind(_key(i, self._keys)) for i in found)
        parts = [f"{n} {kind}{'s' * (n > 1)}" for kind in ("collective", "product", "attention") if (n := kinds[kind])]
        who = "both strands" if len(strands) == 2 else f"strand {strands.pop()}" if strands else "one strand"
        return f"{who}: {', '.join(parts)}"

    def names(self, heads: Sequence[Instruction]) -> dict[Instruction, str]:
        """A unique, readable name for each instruction of `heads`. An end of a collective is named after its start."""
        ends = {head: start_of(head) for head in heads if is_done(head)}
        ordered = sorted({head for head in heads if head not in ends} | set(ends.values()), key=self._rank.__getitem__)
        plain = {head: " ".join(filter(None, (self.strand(head), self._label(head)))) for head in ordered}
        counts, given = Counter(plain.values()), Counter[str]()
        names = {}
        for head, name in plain.items():
            given[name] += 1
            names[head] = f"{name} {given[name]}" if counts[name] > 1 else name
        for end, start in ends.items():
            strand, _, label = names[start].rpartition(self._label(start))
            names[end] = f"{strand}{END}{self._label(start)}{label}"
        return names

    def takes_time(self, instruction: Instruction) -> bool:
        """Whether `instruction` has a key, or is control flow that runs such an instruction. Ends take no time."""
        return instruction in self._texts

    def strand(self, instruction: Instruction) -> str:
        """The strand of `instruction`, `alpha` or `beta`; "" if it is unknown.

        The name of a collective, product or attention says its strand. Another instruction belongs to the strand of the
        collectives, products and attentions that use its result, if they are all of one strand. Otherwise, its own name
        decides.
        """
        users = set() if self._is_work(instruction) else self._strands_of_users[instruction]
        return next(iter(users)) if len(users) == 1 else _strand_in_name(instruction)

    def _in_order(self) -> list[Instruction]:
        """The instructions that take time, sorted by depth, then by JAX's name, then by their order in the module.

        The depth is the largest number of instructions that take time on a path of operands.
        """
        depth: dict[Instruction, int] = {}
        for instruction in self.computation.instructions:
            above = max((depth[o] for o in instruction.operands), default=0)
            depth[instruction] = above + (instruction in self._texts)
        place = {i: n for n, i in enumerate(self.computation.instructions)}
        return sorted(self._texts, key=lambda i: (depth[i], i.op_name, place[i]))

    @cached_property
    def _rank(self) -> dict[Instruction, int]:
        return {instruction: n for n, instruction in enumerate(self._in_order())}

    @cached_property
    def _strands_of_users(self) -> Mapping[Instruction, set[str]]:
        """For each instruction, the strands of the collectives, products and attentions that use its result.

        The use may be direct or through other instructions.
        """
        found: dict[Instruction, set[str]] = {i: set() for i in self.computation.instructions}
        for instruction in reversed(self.computation.instructions):
            strands = {_strand_in_name(instruction)} if self._is_work(instruction) else found[instruction]
            for operand in instruction.operands:
                found[operand] |= strands - {""}
        return found

    @cached_property
    def _feeds_work(self) -> set[Instruction]:
        """Instructions on whose result a collective, a product or attention depends."""
        found: set[Instruction] = set()
        for instruction in reversed(self.computation.instructions):
            if instruction in found or self._is_work(instruction):
                found.update(instruction.operands)
        return found

    def _is_work(self, instruction: Instruction) -> bool:
        return _kind(_key(instruction, self._keys)) != ""

    def _holds_work(self, instruction: Instruction) -> bool:
        inside = _inside(instruction, self._keys) if instruction.opcode in CONTROL_FLOW else ()
        return any(map(is_work, inside))

    def _label(self, instruction: Instruction) -> str:
        key = _key(instruction, self._keys)
        if key is None:
            return {"while": "loop", "conditional": "branch"}.get(instruction.opcode, instruction.opcode)
        if isinstance(key, CollectiveKey):
            return key.kind
        if key.kind in ("gemm", "grouped-gemm"):
            if BACKWARD_NAME not in instruction.op_name:
                return "gemm"
            if RECOMPUTED in instruction.op_name:
                return "recomputed gemm"
            return "dgrad" if instruction in self._feeds_work else "wgrad"
        if key.family.startswith(FAMILY):
            return FAMILY.replace("-", " ")
        if key.kind == "fusion":  # loop-multiply:1f0c33a57e
            return key.family.partition(":")[0].partition("-")[2]
        return key.kind.replace("-", " ")


def operator_text(instruction: Instruction, keys: OperatorKeys) -> str:
    """The key of `instruction` as text; "" if it takes no time, or if it is the end of a collective."""
    if is_done(instruction):
        return ""
    if instruction.opcode in CONTROL_FLOW:
        inside = _inside(instruction, keys)
        work = sorted(text for text in inside.elements() if is_work(text))
        return f"{instruction.opcode}:{blake2b(repr(work).encode(), digest_size=5).hexdigest()}" if inside else ""
    key = _key(instruction, keys)
    return "" if key is None else str(_as_computed(key))


def _as_computed(key: Key) -> Key:
    """The key of a product without library, epilogue and result type, which compiler and autotuner choose.

    Other keys are returned as they are.
    """
    parts = _COMPUTED.get(key.kind)
    if parts is None or not isinstance(key, OperatorKey):
        return key
    types, *others = key.family.split(":")[:parts]
    return OperatorKey(key.kind, ":".join([types.partition("->")[0], *others]), key.sizes)


def _key(instruction: Instruction, keys: OperatorKeys) -> Key | None:
    return keys[instruction] or kernel_key(instruction) or transfer_key(instruction)


def is_work(text: str) -> bool:
    """Whether `text` is the key of a collective, a product, attention or control flow, not of a fusion or a copy."""
    kind, _, rest = text.partition(" ")
    known = kind in _WORK or kind in COLLECTIVE_KINDS or kind.partition(":")[0] in CONTROL_FLOW
    return known or rest.startswith(FAMILY)


def _inside(instruction: Instruction, keys: OperatorKeys) -> Counter[str]:
    """Counts the keys of the instructions that control flow runs, without loop conditions."""
    found = Counter(operator_text(i, keys) for c in entered(instruction) for i in c.instructions)
    del found[""]
    return found


def _kind(key: Key | None) -> str:
    """`collective`, `product` or `attention`; "" for other instructions."""
    if key is None or isinstance(key, CollectiveKey):
        return "" if key is None else "collective"
    return "product" if key.family.startswith(FAMILY) else _WORK.get(key.kind, "")


def _strand_in_name(instruction: Instruction) -> str:
    """The strand that JAX's name (`op_name`) of `instruction` says; "" if it says none.

    A fusion without a name has the name of its last fused instruction with a name.
    """
    return next((s for mark, s in _STRANDS.items() if mark in _op_name(instruction)), "")


def _op_name(instruction: Instruction) -> str:
    if instruction.op_name or instruction.opcode not in ("fusion", "async-start"):
        return instruction.op_name
    inside = (i.op_name for called in instruction.called for i in reversed(called.instructions) if i.op_name)
    return next(inside, "")
