"""HLO text of other XLA versions, as far as small repairs make it readable to this one's parser.

    custom-call(p), api_version=API_VERSION_UNSPECIFIED    the default, written out
    f8e4m3b11[]                                            f8e4m3b11fnuz, before it was renamed
    async-start(x), async_group_id=0                       left out: operands say which start and done are a pair
    copy-start(x), is_cross_program_prefetch=true          an unexpected attribute: left out, and said so
    parameter(0), sharding={mesh[x=8], [{x}]}              an attribute that informs only and does not parse: the same
    f32[32768,32768] constant({...})                       read without its 4 GiB, which the text does not hold

An unexpected attribute is one that this XLA knows nothing of, and so does the cost model. The parser names it and its
place; it is left out of all instructions of that kind.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.hlo import HloModule, Instruction, schema

_SPELLINGS = (
    (re.compile(r", api_version=API_VERSION_UNSPECIFIED\b"), ""),
    (re.compile(r"\bf8e4m3b11(?=\[)"), "f8e4m3b11fnuz"),
    (re.compile(r", async_group_id=\d+"), ""),  # of `custom-call-start`, it ends the parser's process
)
_UNEXPECTED = re.compile(r'was parsing (\d+):\d+: error: unexpected attribute "([\w.\-]+)"')
_UNPARSED = re.compile(r"was parsing (\d+):\d+: error: error parsing attribute ([\w.\-]+)")
_INFORM = frozenset(("sharding", "origin", "metadata", "statistics"))  # no time, size or order depends on these
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_ROUNDS = 60  # attributes of opcodes before we give up

_LARGE = 2**22  # elements
_ELIDED = re.compile(r"(= \w+\[([\d,]+)\]\S*) constant\(\{\.\.\.\}\)")
_STAND_IN = "dhelix_elided_constant"


@dataclass(frozen=True)
class Repaired:
    """A module, and in words the attributes that were left out to read it."""

    module: HloModule
    left_out: tuple[str, ...]


def read(text: str) -> Repaired:
    """Parses the text of one module. Raises DhelixError with XLA's message, or ParserStopped, where nothing helps."""
    for pattern, word in _SPELLINGS:
        text = pattern.sub(word, text)
    text = _ELIDED.sub(_without_value, text)
    left_out: dict[str, None] = {}
    rounds = 0
    while True:
        try:
            source = jax_compat.parse_foreign_hlo_text(text)
        except jax_compat.ParserStopped:
            raise
        except DhelixError as error:
            shorter, attribute = _without_refused(text, str(error))
            if shorter == text or rounds == _ROUNDS:
                raise
            text, rounds = shorter, rounds + 1
            left_out[attribute] = None
        else:
            return Repaired(_with_constants(HloModule.of_parsed_text(source, text)), tuple(left_out))


def _without_refused(text: str, error: str) -> tuple[str, str]:
    """The text without the attribute that XLA's message is about, and what went; the same text if it names none.

    It goes from instructions of that opcode: others may need one of that name. Metadata are alike in all.
    """
    found = _UNEXPECTED.search(error)
    if not found:
        found = next((f for f in _UNPARSED.finditer(error) if f[2] in _INFORM), None)
    if not found:
        return text, ""
    name = found[2]
    lines = text.split("\n")
    kind = _opcode(lines[int(found[1]) - 1])
    everywhere = "op_name" in error.partition("Allowed attributes: ")[2].partition("\n")[0]
    for number, line in enumerate(lines):
        if f"{name}=" in line and (everywhere or _opcode(line) == kind):
            lines[number] = _without(line, name)
    return "\n".join(lines), f"{name} of {'metadata' if everywhere else kind or 'the module'}"


def _opcode(line: str) -> str:
    """Of an instruction; empty in other lines."""
    _, equals, right = line.partition(" = ")
    found = _OPCODE.search(f" {right}") if equals else None
    return found[1] if found else ""


def _without(line: str, name: str) -> str:
    """A line without `, name=value`; a value is a word, a string or what stands between braces."""
    start = re.search(rf"(?:,\s*|\s+|(?<=\{{)){re.escape(name)}=", line)
    if start is None:
        return line
    depth, at = 0, start.end()
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[{}\[\](),\s]|[^"{}\[\](),\s]+', line[start.end() :]):
        if depth == 0 and (token[0] in "}])," or token[0].isspace()):
            break
        depth += (token[0] in "{[(") - (token[0] in "}])")
        at = start.end() + token.end()
    return line[: start.start()] + line[at:]


def _without_value(constant: re.Match[str]) -> str:
    """XLA would fill an elided constant with zeros, as many as its shape says."""
    if math.prod(map(int, constant[2].split(","))) < _LARGE:
        return constant[0]
    return f'{constant[1]} custom-call(), custom_call_target="{_STAND_IN}"'


def _with_constants(module: HloModule) -> HloModule:
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.proto.custom_call_target == _STAND_IN:
                _make_constant(instruction)
    return module


def _make_constant(instruction: Instruction) -> None:
    """A constant without a literal, which is what XLA writes where it dropped one."""
    own = instruction.proto
    kept = {"name": own.name, "shape": own.shape, "id": own.id, "metadata": own.metadata}
    own.CopyFrom(schema.InstructionProto(opcode="constant", **kept))
