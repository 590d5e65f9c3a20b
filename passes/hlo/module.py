"""An HLO module as a graph of Python objects over `HloModuleProto`.

`HloModule.from_bytes` turns ids into references (`instruction.operands`, `instruction.called`), so passes edit
references and never ids. `to_bytes` gives ids to new instructions and writes references back as ids. Fields that the
schema does not declare stay in each object's `proto` and are written back unchanged.

`computation.instructions` holds operands before users. `module.computations` holds callees before callers. A pass may
append instructions and computations out of order. `to_bytes` restores the order and moves no more than it must.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.hlo import schema, shapes

_COUNTS = re.compile(r"\b(replica_count|num_partitions)=(\d+)")  # in the first line of HLO text
NEW = -1  # id of an instruction that `to_bytes` has not numbered yet; 0 is a valid id


class Instruction:
    """One HLO instruction, compared and hashed by identity. All other attributes are in `proto`."""

    __slots__ = ("_opcode", "called", "computation", "control_predecessors", "operands", "proto")

    def __init__(self, proto: Any, computation: "Computation") -> None:
        self.proto = proto
        self._opcode: str = sys.intern(proto.opcode)
        self.computation = computation
        self.operands: list[Instruction] = []
        self.control_predecessors: list[Instruction] = []
        self.called: list[Computation] = []

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def opcode(self) -> str:
        return self._opcode

    @opcode.setter  # to be set here and not in `proto`, which would make a new string at each of the many lookups
    def opcode(self, opcode: str) -> None:
        self._opcode = self.proto.opcode = opcode

    @property
    def shape(self) -> Any:
        return self.proto.shape

    @property
    def op_name(self) -> str:
        """JAX's name stack: the place in the user's program, such as `jit(step)/while/body/dot_general`."""
        return self.proto.metadata.op_name

    @property
    def tuple_index(self) -> int:
        return self.proto.tuple_index

    def __repr__(self) -> str:
        operands = ", ".join(o.name for o in self.operands)
        return f"{self.name} = {shapes.text(self.shape)} {self.opcode}({operands})"


class Computation:
    """A list of instructions with one root. Instructions of other computations call it."""

    __slots__ = ("instructions", "module", "proto", "root")

    def __init__(self, proto: Any, module: "HloModule") -> None:
        self.proto = proto
        self.module = module
        self.instructions: list[Instruction] = []
        self.root: Instruction = None  # type: ignore[assignment]  # set before any use, by from_bytes or a builder

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def id(self) -> int:
        return self.proto.id

    @property
    def parameters(self) -> list[Instruction]:
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(found, key=lambda i: i.proto.parameter_number)

    def users(self) -> dict[Instruction, list[Instruction]]:
        """Maps every instruction to its data-flow users, each listed once, in instruction order."""
        users: dict[Instruction, list[Instruction]] = {i: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    def sort(self) -> None:
        """Moves operands and control predecessors before their users. Keeps the present order otherwise."""
        where = f"instructions of {self.name} depend on each other"
        self.instructions = _needed_first(self.instructions, lambda i: i.operands + i.control_predecessors, where)

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.instructions)} instructions>"


class HloModule:
    """A parsed module. `schedule` maps computations to instruction sequences. It is empty before scheduling.

    Attributes:
      device_counts: (number of replicas, number of partitions); both are 0 if the module does not give them.
    """

    def __init__(self, source: bytes, origin: str = "the input") -> None:
        try:
            self.proto = schema.ModuleProto.FromString(source)
        except DecodeError as error:
            raise DhelixError(f"{origin} is not a serialized HloModuleProto, or it is cut short: {error}") from None
        self._source = source
        self._source_rewritten: bytes | None = None
        self._names: dict[str, int] | None = None
        assigned = self.proto.device_assignment
        self.device_counts: tuple[int, int] = assigned.replica_count, assigned.computation_count
        self.computations = [Computation(proto, self) for proto in self.proto.computations]
        del self.proto.computations[:]  # from here on, the Computation objects hold these protos
        self._last_computation = max((c.id for c in self.computations), default=0)
        try:
            by_id = _by_id(self.computations)
            for computation in self.computations:
                _read_instructions(computation, by_id)
            self.entry = by_id[self.proto.entry_computation_id]
            self.schedule: dict[Computation, list[Instruction]] = {
                by_id[key]: _read_sequence(by_id[key], sequence.instruction_ids)
                for key, sequence in sorted(self.proto.schedule.sequences.items())
            }
            if self.proto.entry_computation_name not in ("", self.entry.name):
                raise KeyError(self.proto.entry_computation_name)
        except KeyError as error:
            raise DhelixError(
                f"{origin} is not an HLO module, or it is cut short: instruction or computation {error} is "
                "missing or duplicated; give a whole HloModuleProto, as --xla_dump_hlo_as_proto writes it"
            ) from None
        reachable = self._callees([self.entry])
        self._unused = [c for c in self.computations if c not in reachable]  # kept, although nothing calls them

    @classmethod
    def from_bytes(cls, source: bytes) -> "HloModule":
        return cls(source)

    @classmethod
    def from_text(cls, text: str) -> "HloModule":
        """Parses HLO text as XLA prints it. Raises DhelixError with XLA's message if the text does not parse."""
        return cls.of_parsed_text(jax_compat.parse_hlo_text(text), text)

    @classmethod
    def of_parsed_text(cls, source: bytes, text: str) -> "HloModule":
        """Reads `source`, the bytes that XLA's parser made from `text`.

        Takes the device counts from the header of `text`, because `source` lacks them.
        """
        module = cls(source, "the HLO text")
        header = text[max(text.find("HloModule "), 0) :].partition("\n")[0]
        said = {name: int(number) for name, number in _COUNTS.findall(header)}
        if said:
            module.device_counts = said.get("replica_count", 1), said.get("num_partitions", 1)
        return module

    @classmethod
    def from_file(cls, path: str | Path) -> "HloModule":
        """Reads a file of an XLA dump: text (.txt, .hlo), HloModuleProto (.pb) or HloProto (.hlo.pb)."""
        path = Path(path)
        if not path.is_file():
            raise DhelixError(f"{path}: no such file; name one .hlo.pb or .txt file of an --xla_dump_to folder")
        data = path.read_bytes()
        if path.suffix in (".txt", ".hlo"):
            try:
                return cls.from_text(data.decode())
            except (UnicodeDecodeError, DhelixError) as error:
                raise DhelixError(f"{path} does not parse as HLO text: {error}") from None
        return cls.from_proto(data, str(path))

    @classmethod
    def from_proto(cls, data: bytes, origin: str = "the input") -> "HloModule":
        """Reads a serialized HloModuleProto, or an HloProto (`.hlo.pb`) or HloSnapshot that wraps one.

        Raises DhelixError if `data` is none of these or is cut short.
        """
        return cls(cls.unwrapped(data, origin), origin)

    @staticmethod
    def unwrapped(data: bytes, origin: str = "the input") -> bytes:
        """The serialized HloModuleProto in `data`; see `from_proto`."""
        candidate: bytes | None = data
        while candidate is not None:
            if schema.looks_like_module(candidate):
                return candidate
            candidate = schema.wrapped(candidate)
        raise DhelixError(
            f"{origin} holds no HLO module (not a serialized HloModuleProto or HloProto, or cut short); "
            "dump again with --xla_dump_to=DIR --xla_dump_hlo_as_proto, or give the .txt file"
        )

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def partitions(self) -> int:
        """Number of partitions if the module has one replica; 0 if it has several, or does not give the numbers."""
        found = self.proto.device_assignment
        return found.computation_count if found.replica_count == 1 else 0

    @property
    def is_scheduled(self) -> bool:
        return bool(self.schedule)

    @property
    def instruction_count(self) -> int:
        return sum(len(c.instructions) for c in self.computations)

    def clone(self) -> "HloModule":
        copy = HloModule(self.to_bytes())
        copy.device_counts = self.device_counts
        return copy

    def unique_name(self, base: str) -> str:
        """Returns `base` without its trailing numbers, plus a number that makes the name unique in the module."""
        self.reserve_names()
        assert self._names is not None
        stem = re.sub(r"(\.\d+)+$", "", base) or "value"
        self._names[stem] = self._names.get(stem, 0) + 1
        return f"{stem}.{self._names[stem]}"

    def reserve_names(self) -> None:
        """Registers all names. Call this before you remove instructions, so that their names are not used again."""
        if self._names is None:
            self._names = {}
            for computation in self.computations:
                self._reserve(computation.name)
                for instruction in computation.instructions:
                    self._reserve(instruction.name)

    def _reserve(self, name: str) -> None:
        stem, _, number = name.rpartition(".")
        assert self._names is not None
        if stem and number.isdecimal():
            self._names[stem] = max(self._names.get(stem, 0), int(number))
        else:
            self._names.setdefault(name, 0)

    def new_computation(self, base: str) -> Computation:
        """Adds an empty computation, which a Builder fills. `to_bytes` drops the computation if nothing calls it."""
        self._last_computation += 1
        computation = Computation(schema.ComputationProto(name=self.unique_name(base), id=self._last_computation), self)
        self.computations.append(computation)
        return computation

    def to_bytes(self) -> bytes:
        """Serializes the module deterministically. Returns the input's own bytes if nothing changed."""
        self._arrange()
        proto = schema.ModuleProto()
        proto.CopyFrom(self.proto)
        for computation in self.computations:
            _write_computation(computation, proto.computations.add())
        proto.entry_computation_id = self.entry.id
        if proto.entry_computation_name:
            proto.entry_computation_name = self.entry.name
        if proto.HasField("host_program_shape"):
            _describe(self.entry, proto.host_program_shape)
        if self.schedule or self.proto.schedule.sequences:
            proto.ClearField("schedule")
        for computation, sequence in self.schedule.items():
            ids = proto.schedule.sequences[computation.id].instruction_ids
            ids.extend(i.proto.id for i in sequence)
        result = proto.SerializeToString(deterministic=True)
        if self._source_rewritten is None:
            source = schema.ModuleProto.FromString(self._source)
            self._source_rewritten = source.SerializeToString(deterministic=True)
        return self._source if result == self._source_rewritten else result

    def to_text(self) -> str:
        return jax_compat.hlo_text(self.to_bytes())

    @staticmethod
    def _callees(roots: Iterable[Computation]) -> dict[Computation, list[Computation]]:
        """Maps each root, and each computation that a root reaches, to the computations that it calls directly."""
        found: dict[Computation, list[Computation]] = {}
        pending = list(roots)
        while pending:
            top = pending.pop()
            if top not in found:
                found[top] = list(dict.fromkeys(c for i in top.instructions for c in i.called))
                pending.extend(found[top])
        return found

    def _arrange(self) -> None:
        """Puts callees before callers, drops computations that became unused, and gives ids to new instructions."""
        callees = self._callees([self.entry, *self._unused])
        present = {c: None for c in self.computations if c in callees}
        present.update(dict.fromkeys(callees))  # a pass may use a computation that `to_bytes` dropped before
        circle = f"computations of {self.name} call each other"
        self.computations = _needed_first(list(present), lambda c: callees[c], circle)
        self.schedule = {c: s for c, s in self.schedule.items() if c in callees}
        for computation in self.computations:
            computation.sort()
            ids = [i.proto.id for i in computation.instructions]
            number = max((n & 0xFFFFFFFF for n in ids if n != NEW), default=0)
            for instruction in computation.instructions:
                if instruction.proto.id == NEW:
                    number += 1
                    instruction.proto.id = (computation.id << 32) | number


def _by_id(objects: list[Any]) -> dict[int, Any]:
    """Maps the id in each object's proto to the object. Raises KeyError if two objects share an id."""
    found = {o.proto.id: o for o in objects}
    if len(found) != len(objects):
        seen: set[int] = set()
        raise KeyError(next(o.name for o in objects if o.proto.id in seen or seen.add(o.proto.id)))
    return found


def _read_instructions(computation: Computation, computations: dict[int, Computation]) -> None:
    computation.instructions = [Instruction(proto, computation) for proto in computation.proto.instructions]
    del computation.proto.instructions[:]
    by_id = _by_id(computation.instructions)
    for instruction in computation.instructions:
        proto = instruction.proto
        instruction.operands = [by_id[i] for i in proto.operand_ids]
        if proto.control_predecessor_ids:
            instruction.control_predecessors = [by_id[i] for i in proto.control_predecessor_ids]
        if proto.called_computation_ids:
            instruction.called = [computations[i] for i in proto.called_computation_ids]
    computation.root = by_id[computation.proto.root_id]


def _read_sequence(computation: Computation, ids: Iterable[int]) -> list[Instruction]:
    by_id = _by_id(computation.instructions)
    return [by_id[i] for i in ids]


def _write_computation(computation: Computation, proto: Any) -> None:
    for instruction in computation.instructions:
        own = instruction.proto
        own.operand_ids[:] = [o.proto.id for o in instruction.operands]
        if own.control_predecessor_ids or instruction.control_predecessors:
            own.control_predecessor_ids[:] = [o.proto.id for o in instruction.control_predecessors]
        if own.called_computation_ids or instruction.called:
            own.called_computation_ids[:] = [c.id for c in instruction.called]
    proto.CopyFrom(computation.proto)
    proto.instructions.extend(i.proto for i in computation.instructions)
    proto.root_id = computation.root.proto.id
    _describe(computation, proto.program_shape)


def _describe(computation: Computation, program: Any) -> None:
    """Writes a computation's signature to `program` if its shapes changed. Otherwise leaves `program` unchanged."""
    parameters = computation.parameters
    wanted = [*(p.shape for p in parameters), computation.root.shape]
    known = [*program.parameters, program.result]
    if len(known) != len(wanted) or not all(map(shapes.same, known, wanted)):
        del program.parameters[:], program.parameter_names[:]
        program.parameters.extend(p.shape for p in parameters)
        program.parameter_names.extend(p.name for p in parameters)
        program.result.CopyFrom(computation.root.shape)


def _needed_first[T: Computation | Instruction](
    items: list[T], needs: Callable[[T], Iterable[T]], circle: str
) -> list[T]:
    """Sorts `items` so that each item comes after the items that it needs. Ignores needed items outside `items`."""
    placed: set[T] = set()
    for item in items:
        if not placed.issuperset(needs(item)):
            break
        placed.add(item)
    else:
        return items
    members, order, entered = set(items), [], set()
    placed.clear()
    for start in items:
        stack = [start]
        while stack:
            top = stack[-1]
            waiting = [n for n in needs(top) if n in members and n not in placed]
            if top in placed:
                stack.pop()
            elif not waiting:
                placed.add(top)
                order.append(stack.pop())
            elif top in entered:
                raise DhelixError(f"{circle} in a circle at {top.name}")
            else:
                entered.add(top)
                stack.extend(reversed(waiting))
    return order
