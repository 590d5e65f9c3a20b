"""A module of HLO as a graph of Python objects over `HloModuleProto`.

`HloModule.from_bytes` turns ids into references (`instruction.operands`, `instruction.called`), so that
passes edit pointers and never ids; `to_bytes` numbers what is new and writes references back. Everything that
the schema does not declare stays in each object's `proto` and is written back as it was.

Order is kept: `computation.instructions` holds operands before users, `module.computations` callees before
callers. A pass may append out of order; `to_bytes` restores the order with the least movement.
"""

import re
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from dhelix.passes import jax_compat
from dhelix.passes.errors import DhelixError
from dhelix.passes.hlo import schema, shapes

NEW = -1  # id of an instruction that the module has not been written with yet; 0 is a valid id


class Instruction:
    """One HLO instruction. Compared and hashed by identity; attributes not listed here are in `proto`."""

    __slots__ = ("called", "computation", "control_predecessors", "operands", "proto")

    def __init__(self, proto: Any, computation: "Computation") -> None:
        self.proto = proto
        self.computation = computation
        self.operands: list[Instruction] = []
        self.control_predecessors: list[Instruction] = []
        self.called: list[Computation] = []

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def opcode(self) -> str:
        return self.proto.opcode

    @property
    def shape(self) -> Any:
        return self.proto.shape

    @property
    def op_name(self) -> str:
        """Where the user's program made it: JAX's name stack, such as `jit(step)/while/body/dot_general`."""
        return self.proto.metadata.op_name

    @property
    def tuple_index(self) -> int:
        return self.proto.tuple_index

    def __repr__(self) -> str:
        operands = ", ".join(o.name for o in self.operands)
        return f"{self.name} = {shapes.text(self.shape)} {self.opcode}({operands})"


class Computation:
    """A list of instructions with one root; called by instructions of other computations."""

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
        """Users of every instruction by data flow, each once, in instruction order."""
        users: dict[Instruction, list[Instruction]] = {i: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    def sort(self) -> None:
        """Operands and control predecessors before users, otherwise keeping the present order."""
        seen: set[Instruction] = set()
        if all(self._defined(i, seen) for i in self.instructions):
            return
        order: list[Instruction] = []
        state: dict[Instruction, int] = {}  # 1 being visited, 2 placed
        for start in self.instructions:
            stack = [start]
            while stack:
                top = stack[-1]
                if state.get(top) == 2:
                    stack.pop()
                    continue
                waiting = [o for o in (*top.operands, *top.control_predecessors) if state.get(o) != 2]
                if not waiting:
                    state[top] = 2
                    order.append(top)
                    stack.pop()
                elif state.get(top) == 1:
                    raise DhelixError(
                        f"instructions of {self.name} depend on each other in a circle at {top.name}"
                    )
                else:
                    state[top] = 1
                    stack.extend(reversed(waiting))
        self.instructions = order

    @staticmethod
    def _defined(instruction: Instruction, seen: set[Instruction]) -> bool:
        seen.add(instruction)
        return all(o in seen for o in instruction.operands) and all(
            o in seen for o in instruction.control_predecessors
        )

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.instructions)} instructions>"


class HloModule:
    """A parsed module. `schedule` maps computations to instruction sequences; empty before scheduling."""

    def __init__(self, source: bytes, origin: str = "HLO module") -> None:
        try:
            self.proto = schema.ModuleProto.FromString(source)
        except DecodeError as error:
            raise DhelixError(
                f"{origin} is no serialized HloModuleProto, or it is cut short: {error}"
            ) from None
        self._source = source
        self._names: dict[str, int] | None = None
        self._last_computation = max((c.id for c in self.proto.computations), default=0)
        by_id: dict[int, Computation] = {}
        self.computations: list[Computation] = []
        for proto in self.proto.computations:
            computation = Computation(proto, self)
            by_id[proto.id] = computation
            self.computations.append(computation)
        instructions: dict[int, Instruction] = {}
        try:
            for computation in self.computations:
                self._read_instructions(computation, by_id, instructions)
            self.entry = by_id[self.proto.entry_computation_id]
            self.schedule: dict[Computation, list[Instruction]] = {
                by_id[key]: [instructions[i] for i in sequence.instruction_ids]
                for key, sequence in sorted(self.proto.schedule.sequences.items())
            }
        except KeyError as error:
            raise DhelixError(
                f"{origin} is not a well-formed HLO module: it refers to id {error}, which it does not hold; "
                "give a whole HloModuleProto as written by --xla_dump_hlo_as_proto or an HLO pass hook"
            ) from None

    @staticmethod
    def _read_instructions(
        computation: Computation, by_id: dict[int, Computation], instructions: dict[int, Instruction]
    ) -> None:
        own = [Instruction(proto, computation) for proto in computation.proto.instructions]
        instructions.update((i.proto.id, i) for i in own)
        for instruction in own:
            proto = instruction.proto
            instruction.operands = [instructions[i] for i in proto.operand_ids]
            if proto.control_predecessor_ids:
                instruction.control_predecessors = [instructions[i] for i in proto.control_predecessor_ids]
            if proto.called_computation_ids:
                instruction.called = [by_id[i] for i in proto.called_computation_ids]
        computation.instructions = own
        computation.root = instructions[computation.proto.root_id]

    @classmethod
    def from_bytes(cls, source: bytes) -> "HloModule":
        return cls(source)

    @classmethod
    def from_text(cls, text: str) -> "HloModule":
        """Parses HLO text as XLA prints it. Raises DhelixError with XLA's message when it does not parse."""
        return cls(jax_compat.parse_hlo_text(text), "the HLO text")

    @classmethod
    def from_file(cls, path: str | Path) -> "HloModule":
        """Reads a file of an XLA dump: text (.txt, .hlo), HloModuleProto (.pb) or HloProto (.hlo.pb)."""
        path = Path(path)
        if not path.is_file():
            raise DhelixError(
                f"{path}: no such file; name one .hlo.pb or .txt file of an --xla_dump_to folder"
            )
        data = path.read_bytes()
        if path.suffix in (".txt", ".hlo"):
            try:
                return cls.from_text(data.decode())
            except (UnicodeDecodeError, DhelixError) as error:
                raise DhelixError(f"{path} does not parse as HLO text: {error}") from None
        for candidate in (data, _hlo_proto_payload(data)):
            if candidate is not None and _looks_like_module(candidate):
                return cls(candidate, str(path))
        raise DhelixError(
            f"{path} holds no HLO module (not a serialized HloModuleProto or HloProto, or cut short); "
            "dump again with --xla_dump_to=DIR --xla_dump_hlo_as_proto, or give the .txt file"
        )

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def is_scheduled(self) -> bool:
        return bool(self.schedule)

    @property
    def instruction_count(self) -> int:
        return sum(len(c.instructions) for c in self.computations)

    def clone(self) -> "HloModule":
        return HloModule(self.to_bytes())

    def unique_name(self, base: str) -> str:
        """`base`, trailing numbers dropped, with a number that nothing of that name in the module has."""
        if self._names is None:
            self._names = {}
            for computation in self.computations:
                self._reserve(computation.name)
                for instruction in computation.instructions:
                    self._reserve(instruction.name)
        stem = re.sub(r"(\.\d+)+$", "", base) or "value"
        self._names[stem] = self._names.get(stem, 0) + 1
        return f"{stem}.{self._names[stem]}"

    def _reserve(self, name: str) -> None:
        stem, _, number = name.rpartition(".")
        assert self._names is not None
        if stem and number.isdigit():
            self._names[stem] = max(self._names.get(stem, 0), int(number))
        else:
            self._names.setdefault(name, 0)

    def new_computation(self, base: str) -> Computation:
        """An empty computation, to be filled by a Builder. `to_bytes` drops it if nothing calls it."""
        self._last_computation += 1
        computation = Computation(
            schema.ComputationProto(name=self.unique_name(base), id=self._last_computation), self
        )
        self.computations.append(computation)
        return computation

    def to_bytes(self) -> bytes:
        """The module as bytes: the input's own when nothing changed, else a deterministic serialisation."""
        self._arrange()
        proto = schema.ModuleProto()
        proto.CopyFrom(self.proto)
        del proto.computations[:]
        for computation in self.computations:
            proto.computations.append(self._write_computation(computation))
        proto.schedule.sequences.clear()
        for computation, sequence in self.schedule.items():
            ids = proto.schedule.sequences[computation.id].instruction_ids
            ids.extend(i.proto.id for i in sequence)
        if not self.schedule and not self.proto.HasField("schedule"):
            proto.ClearField("schedule")
        result = proto.SerializeToString(deterministic=True)
        unchanged = schema.ModuleProto.FromString(self._source).SerializeToString(deterministic=True)
        return self._source if result == unchanged else result

    def to_text(self) -> str:
        return jax_compat.hlo_text(self.to_bytes())

    def _arrange(self) -> None:
        """Orders computations callee first (dropping the unreachable ones) and numbers new instructions."""
        order: dict[Computation, None] = {}
        position = {c: n for n, c in enumerate(self.computations)}
        stack: list[tuple[Computation, bool]] = [(self.entry, False)]
        while stack:
            computation, expanded = stack.pop()
            if computation in order:
                continue
            if expanded:
                order[computation] = None
                continue
            stack.append((computation, True))
            called = {c for i in computation.instructions for c in i.called if c not in order}
            stack.extend((c, False) for c in sorted(called, key=lambda c: -position[c]))
        present = [c for c in self.computations if c in order]
        self.computations = present if _callees_first(present) else list(order)
        self.schedule = {c: s for c, s in self.schedule.items() if c in order}
        for computation in self.computations:
            computation.sort()
            number = max(
                (i.proto.id & 0xFFFFFFFF for i in computation.instructions if i.proto.id != NEW), default=0
            )
            for instruction in computation.instructions:
                if instruction.proto.id == NEW:
                    number += 1
                    instruction.proto.id = (computation.id << 32) | number

    @staticmethod
    def _write_computation(computation: Computation) -> Any:
        for instruction in computation.instructions:
            proto = instruction.proto
            proto.operand_ids[:] = [o.proto.id for o in instruction.operands]
            if proto.control_predecessor_ids or instruction.control_predecessors:
                proto.control_predecessor_ids[:] = [o.proto.id for o in instruction.control_predecessors]
            if proto.called_computation_ids or instruction.called:
                proto.called_computation_ids[:] = [c.id for c in instruction.called]
        proto = schema.ComputationProto()
        proto.CopyFrom(computation.proto)
        del proto.instructions[:]
        proto.instructions.extend(i.proto for i in computation.instructions)
        proto.root_id = computation.root.proto.id
        parameters = computation.parameters
        program = proto.program_shape
        known = [*program.parameters, program.result]
        if len(known) != len(parameters) + 1 or not all(
            shapes.same(a, b.shape) for a, b in zip(known, (*parameters, computation.root), strict=True)
        ):
            del program.parameters[:], program.parameter_names[:]
            program.parameters.extend(p.shape for p in parameters)
            program.parameter_names.extend(p.name for p in parameters)
            program.result.CopyFrom(computation.root.shape)
        return proto


def _callees_first(computations: list[Computation]) -> bool:
    seen: set[Computation] = set()
    for computation in computations:
        if any(c not in seen for i in computation.instructions for c in i.called):
            return False
        seen.add(computation)
    return True


def _hlo_proto_payload(data: bytes) -> bytes | None:
    """The `hlo_module` (field 1) of an HloProto, which is what `--xla_dump_hlo_as_proto` writes."""
    if data[:1] != b"\x0a":
        return None
    size, shift, start = 0, 0, 1
    for byte in data[1:11]:
        start += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return data[start : start + size] if start + size <= len(data) else None


def _looks_like_module(data: bytes) -> bool:
    try:
        proto = schema.ModuleProto.FromString(data)
    except DecodeError:
        return False
    return bool(proto.computations) and any(c.id == proto.entry_computation_id for c in proto.computations)
