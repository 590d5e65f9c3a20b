"""Finds HLO modules in a text, which may be a dump, a log that contains modules, or several dumps in one file.

A module begins with an `HloModule` line. It ends with its entry computation, because callees come before callers.
Computations without this line, as people copy them out of a dump, are read as one module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dhelix.errors import DhelixError

_START = re.compile(r"^[ \t]*HloModule[ \t]+([^\s,]+)(.*)", re.MULTILINE)
_ENTRY = re.compile(r"^[ \t]*ENTRY[ \t]", re.MULTILINE)
_BRACES = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|//[^\n]*|[{}]', re.DOTALL)
_THREAD = re.compile(r'[ \t]*,[ \t]*execution_thread="[^"\n]*"')
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_RECOVERY = re.compile(r",\s*origin_recovery_table=\{\n.*?\n\}", re.DOTALL)  # holds modules that never run
_COMPUTATION = re.compile(
    r"^[ \t]*(?:ENTRY[ \t]+)?%?[\w.\-]+[ \t]*(?:\([^\n]*\)[ \t]*->[^\n]*)?\{[ \t]*\n"  # name {, name (...) -> f32[8] {
    r"\s*(?:ROOT[ \t]+)?%?[\w.\-]+ = (?:\w+\[|\()",  # p = f32[8], or a tuple
    re.MULTILINE,
)
FRAGMENT = "HloModule fragment, is_scheduled=true "  # XLA prints the instructions of a schedule in its order
_LOG_PREFIX = re.compile(r"^[IWEF]\d{4} [\d:.]+ +\d+ [^\]\n]*\] ", re.MULTILINE)
_MLIR = re.compile(r"^\s*(?:#\w+ = |module\b.*\{|func\.func |.*\bstablehlo\.)", re.MULTILINE)


@dataclass(frozen=True)
class ModuleText:
    """One module of a text.

    Attributes:
      text: text from `HloModule` to the end of the entry computation. If the entry computation has no end, the text
        reaches to the next module.
      line: number of the first line, counted from 1.
      is_whole: whether the entry computation has an end.
      after: number of the first line with text between this module's end and the next module; 0 if there is none.
    """

    name: str
    text: str
    line: int
    is_scheduled: bool
    is_whole: bool
    after: int

    @property
    def last_line(self) -> int:
        return self.line + self.text.rstrip().count("\n")


def find_modules(text: str) -> list[ModuleText]:
    """The modules of a text, in order.

    Raises:
      DhelixError: there is no module. The message says what kind of text it is instead.
    """
    text = _RECOVERY.sub(lambda table: "\n" * table[0].count("\n"), text)
    if not _START.search(text):
        text = _LOG_PREFIX.sub("", text)
    if not _START.search(text):
        text = _COMPUTATION.sub(lambda first: FRAGMENT + first[0], text, count=1)
    starts = list(_START.finditer(text))
    if not starts:
        raise DhelixError(_what_else(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    found, line, counted = [], 1, 0
    for start, end in zip(starts, ends, strict=True):
        line, counted = line + text.count("\n", counted, start.start()), start.start()
        found.append(_module(start[1], "is_scheduled=true" in start[2], text[start.start() : end], line))
    return found


def choose(modules: list[ModuleText]) -> tuple[ModuleText, list[str]]:
    """The module to read, and notes on other modules and on text after the module.

    Complete modules come first. Among them, scheduled modules come first. Among these, the largest is chosen.
    """
    best = max(modules, key=lambda m: (m.is_whole, m.is_scheduled, len(m.text)))
    notes = []
    if best.text.startswith(FRAGMENT):
        notes.append("the text has no HloModule line: its computations are one module, in the order of the text")
    if len(modules) > 1:
        others = [f"{m.name} (line {m.line})" for m in modules if m is not best]
        others = others if len(others) < 4 else [*others[:3], f"{len(others) - 3} more"]
        notes.append(
            f"the file holds {len(modules)} modules, and this is {best.name} (line {best.line}), the largest; left "
            f"out: {', '.join(others)}. Put each module into its own file to see it"
        )
    if best.after:
        notes.append(f"the text from line {best.after} on is not part of the module")
    return best, notes


def _module(name: str, is_scheduled: bool, text: str, line: int) -> ModuleText:
    end = _end(text)
    if end is None:  # if no computation is marked as the entry, XLA takes the last one
        is_whole = not _ENTRY.search(text) and _COMMENT.sub("", text).rstrip().endswith("}")
        return ModuleText(name, text, line, is_scheduled, is_whole, 0)
    rest = _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text[end:])
    blank = len(rest) - len(rest.lstrip())
    after = 0 if blank == len(rest) else line + text.count("\n", 0, end + blank)
    return ModuleText(name, text[:end], line, is_scheduled, True, after)


def _end(text: str) -> int | None:
    """The position at which the entry computation ends; None if it has no end."""
    entry = _ENTRY.search(text)
    depth, is_body = 0, False
    for token in _BRACES.finditer(text, entry.end()) if entry else ():
        if token[0] == "{":
            # The brace in `f32[8]{0}` begins a layout. The last brace in `main {` and `-> f32[8]{0} {` begins the body.
            is_body = is_body or (depth == 0 and text[token.start() - 1].isspace())
            depth += 1
        elif token[0] == "}":
            depth -= 1
            if depth == 0 and is_body:
                thread = _THREAD.match(text, token.end())
                return thread.end() if thread else token.end()
    return None


def _what_else(text: str) -> str:
    if not text.strip():
        return "is empty"
    if _MLIR.search(text):
        return "is MLIR (StableHLO or another dialect), the program before XLA compiled it"
    return "holds no HLO module (no line starts with `HloModule`)"
