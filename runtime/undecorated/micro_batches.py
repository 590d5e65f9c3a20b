"""Whether a program may hold several micro-batches, from its text alone: a quick look before the passes.

    may_hold(jax_compat.debug_text(lowered))       # False: one backward pass, so no pass for strands applies

    while { jvp/dot   transpose(jvp)/dot }                      a loop that takes gradients             yes
    call @grad   call @grad                                     a function that takes them, called      yes
                                                                twice
    dot(x0) dot(x1)   with one name, of backward passes,        micro-batches written one after the     yes
                      neither needs the other                   other (Python's for)
    while { jvp/dot }   while { transpose(jvp)/dot }            layers, forward and backward            no

JAX names each operation after the transformations and lines of Python that made it. The answer "yes" may be wrong, for
example for experts that are written one after the other. Then the passes look closer, and find nothing.

Cost: about 15 ms for 100 kB of text, 200 ms for 1 MB, on a slow core. The passes need seconds at their first program,
mostly to be imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property

_FUNCTION = re.compile(r"^ *func\.func .*?@\"?([\w.$-]+)")
_CALL = re.compile(r"\bcall @\"?([\w.$-]+)")
_LOCATION = re.compile(r"loc\((#loc\d*)")
_NAMED = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_REFERENCE = re.compile(r"#loc\d*")
_VALUE = re.compile(r"%[\w$.-]+")
_UNIT = re.compile(r"stablehlo\.(while|dot_general|convolution|custom_call|composite)\b|\bcall @")
_REGIONS = ("cond {", "} do {", "}, {", "} else {")  # lines of an operation that begin where its first line does
BACKWARD, _FORWARD, _AGAIN = "transpose(", "jvp(", "rematted_computation"
"""JAX's names of the backward pass, of what it differentiates, and of what the backward pass computes again."""

type _Lines = tuple[int, int]  # the first one, and the one after the last


def may_hold(text: str) -> bool:
    """Whether a program may take gradients of several micro-batches.

    Args:
      text: StableHLO with locations, as MLIR prints it: an operation a line, its regions indented, and a table of
        locations at the end.
    """
    program = _Program(text.splitlines())
    calls = [name for line in program.lines for name in _CALL.findall(line) if program.takes_gradients_in(name)]
    return (
        len(calls) > len(set(calls))
        or any(_takes_gradients(program.names(body)) for body in program.loops())
        or any(_has_independent(program, block) for block in program.blocks())
    )


def _takes_gradients(names: set[str]) -> bool:
    return any(map(_is_backward, names)) and any(_FORWARD in n and not _is_backward(n) for n in names)


def _is_backward(name: str) -> bool:
    return BACKWARD in name


def _has_independent(program: _Program, block: list[_Lines]) -> bool:
    """Whether a block has two equal parts of backward passes, neither of which needs the other.

    Two kinds of products do not count, because those of equal layers are independent, too: one that nothing else of the
    backward pass needs, which is the gradient of a weight, and one that is computed again.
    """
    needs: dict[str, int] = {}  # for each value: the units before it, as bits
    units: list[tuple[str, bool, int]] = []  # key, whether it is a loop, what it needs
    needed = 0
    for start, end in block:
        line = program.lines[start]
        defined, _, right = line.partition(" = ") if line.lstrip().startswith("%") else ("", "", line)
        inside = "\n".join(program.lines[start + 1 : end])
        before = 0
        for value in _VALUE.findall(right + inside):
            before |= needs.get(value, 0)
        here = before
        kind = _UNIT.search(right)
        if kind and any(_is_backward(name) and _AGAIN not in name for name in program.names((start, end))):
            here |= 1 << len(units)
            needed |= before
            location = _LOCATION.findall(program.lines[end - 1])[-1:]
            key = f"{_VALUE.sub('', right.partition(' loc(')[0])} {location}"
            units.append((key, kind[1] == "while", before))
        for value in _VALUE.findall(defined):
            needs[value] = here
    groups: dict[str, list[int]] = {}
    for number, (key, is_loop, _) in enumerate(units):
        if is_loop or needed >> number & 1:
            groups.setdefault(key, []).append(number)
    return any(not units[b][2] >> a & 1 for of in groups.values() for a, b in zip(of, of[1:], strict=False))


class _Program:
    """The lines of a program, and what they say."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = [line for line in lines if not line.startswith("#loc")]
        self._locations: Mapping[str, str] = {
            found[1]: found[2] for line in lines if line.startswith("#loc") and (found := _NAMED.match(line))
        }
        self._texts: dict[str, frozenset[str]] = {}
        self._known: dict[str, bool] = {}

    @cached_property
    def _functions(self) -> Mapping[str, _Lines]:
        return {found[1]: self._whole(n) for n, line in enumerate(self.lines) if (found := _FUNCTION.match(line))}

    def loops(self) -> Iterator[_Lines]:
        return (self._whole(number) for number, line in enumerate(self.lines) if "stablehlo.while" in line)

    def blocks(self) -> Iterator[list[_Lines]]:
        """The operations of each function and of each manual computation."""
        for number, line in enumerate(self.lines):
            if _FUNCTION.match(line) or "sdy.manual_computation" in line:
                _, end = self._whole(number)
                block, at = [], number + 1
                while at < end - 1:
                    block.append(self._whole(at))
                    at = block[-1][1]
                yield block

    def takes_gradients_in(self, function: str) -> bool:
        """Whether a function of the program holds a forward and a backward pass."""
        if function not in self._known:
            lines = self._functions.get(function)
            self._known[function] = lines is not None and _takes_gradients(self.names(lines))
        return self._known[function]

    def names(self, lines: _Lines) -> set[str]:
        """The names of the operations in some lines, and of the functions that they call."""
        found, called, todo = set[str](), set[str](), [lines]
        while todo:
            part = "\n".join(self.lines[slice(*todo.pop())])
            for location in set(_LOCATION.findall(part)):
                found |= self._text(location)
            for name in set(_CALL.findall(part)) - called:
                called.add(name)
                todo += [self._functions[name]] if name in self._functions else []
        return found

    def _text(self, location: str) -> frozenset[str]:
        """The texts of a location, through locations that it refers to."""
        if location not in self._texts:
            todo, known = [location], {location}
            found = set[str]()
            while todo:
                text = self._locations.get(todo.pop(), "")
                found.add(text)
                further = set(_REFERENCE.findall(text)) - known
                known |= further
                todo += further
            self._texts[location] = frozenset(found)
        return self._texts[location]

    def _whole(self, number: int) -> _Lines:
        """The lines of the operation that begins in line `number`."""
        indent, end = _indent(self.lines[number]), number + 1
        while end < len(self.lines) and (_indent(self.lines[end]) > indent or _goes_on(self.lines[end])):
            end += 1
        closes = end < len(self.lines) and self.lines[end].lstrip().startswith("}") and end > number + 1
        return number, end + closes


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _goes_on(line: str) -> bool:
    return not line.strip() or line.strip() in _REGIONS
