"""Small repairs of HLO text from other XLA versions, so that the parser of this XLA version can read the text.

    custom-call(p), api_version=API_VERSION_UNSPECIFIED    left out: it is the default
    f8e4m3b11[]                                            f8e4m3b11fnuz, its new name
    async-start(x), async_group_id=0                       left out: operands say which start and done are a pair
    copy-start(x), is_cross_program_prefetch=true          an unexpected attribute: left out and reported
    parameter(0), sharding={mesh[x=8], [{x}]}              does not parse, and only informs: left out and reported
    f32[32768,32768] constant({...})                       read without its 4 GiB, which the text does not hold

An attribute is unexpected if this XLA version does not know it. The cost model does not know such an attribute either.
The parser's message names the attribute and the line. The repair removes the attribute from all instructions with the
same opcode.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading.parser_process import PARSER, ParserStopped
from dhelix.passes.hlo import HloModule, Instruction, schema

_SPELLINGS = {  # by a part of the text, which is found faster
    "API_VERSION_UNSPECIFIED": (re.compile(r", api_version=API_VERSION_UNSPECIFIED\b"), ""),
    "f8e4m3b11[": (re.compile(r"\bf8e4m3b11(?=\[)"), "f8e4m3b11fnuz"),
    "async_group_id": (re.compile(r", async_group_id=\d+"), ""),  # crashes the parser's process at `custom-call-start`
}
_UNEXPECTED = re.compile(r'was parsing (\d+):\d+: error: unexpected attribute "([\w.\-]+)"')
_UNPARSED = re.compile(r"was parsing (\d+):\d+: error: error parsing attribute ([\w.\-]+)")
_INFORM = frozenset(("sharding", "origin", "metadata", "statistics"))  # these change no times, sizes or orders
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_ROUNDS = 60  # largest number of attributes to remove

_LARGE = 2**22  # elements
_ELIDED = re.compile(r"(= \w+\[([\d,]+)\]\S*) constant\(\{\.\.\.\}\)")
_STAND_IN = "dhelix_elided_constant"


@dataclass(frozen=True)
class Repaired:
    """A module, and words for the attributes that were removed to read it."""

    module: HloModule
    left_out: tuple[str, ...]


def read(text: str) -> Repaired:
    """Parses the text of one module.

    Raises:
      ParserStopped: XLA's parser aborted its process.
      DhelixError: no repair helps. The message is XLA's.
    """
    for part, (pattern, word) in _SPELLINGS.items():
        if part in text:
            text = pattern.sub(word, text)
    if "{...}" in text:
        text = _ELIDED.sub(_without_value, text)
    left_out: dict[str, None] = {}
    rounds = 0
    while True:
        try:
            source = PARSER.parse(text)
        except ParserStopped:
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
    """Removes the attribute that XLA's message names.

    Only instructions with the opcode in the message lose the attribute, because other opcodes may need an attribute
    with the same name. An attribute inside the metadata is removed from all instructions, because all opcodes have the
    same metadata.

    Returns:
      The text without the attribute, and words for what was removed. If the message names no attribute that can be
      removed, the unchanged text and "".
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
    """The opcode in an instruction's line; empty if the line holds no instruction."""
    _, equals, right = line.partition(" = ")
    found = _OPCODE.search(f" {right}") if equals else None
    return found[1] if found else ""


def _without(line: str, name: str) -> str:
    """The line without `, name=value`. A value is a word, a string, or text between brackets."""
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
    """The text of a custom call that stands in for a large constant whose value was elided.

    XLA would make a constant of the full size, filled with zeros. A small constant is not replaced.
    """
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
    """Turns a stand-in into a constant without a literal. XLA writes such a constant when it drops a literal."""
    own = instruction.proto
    kept = {"name": own.name, "shape": own.shape, "id": own.id, "metadata": own.metadata}
    own.CopyFrom(schema.InstructionProto(**kept))
    instruction.opcode = "constant"
