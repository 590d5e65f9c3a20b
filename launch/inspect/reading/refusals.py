"""What it means for a user that a module is refused, and what to do. XLA's own reason comes last.

XLA's messages name positions in XLA's source code and conditions there. Most users do not know these. A frequent cause
is a schedule that cannot run: the lines of a text, or the numbers in a proto, are in an order that breaks a rule.
"""

from __future__ import annotations

import re

from jaxlib import version

_PARSING = re.compile(r"was parsing (\d+):\d+: error: (.*)")
_UNKNOWN_NAME = re.compile(r"was parsing (\d+):\d+: error: instruction (?:does not exist: |')%?([\w.\-]+)")
_CHECK = re.compile(r"(?:[A-Z_]+: )?(?:RET_CHECK failure|Check failed)(?: \(\S+\))?:? ")
_SCHEDULE = re.compile(r"hlo_schedule\.cc|instruction_position|^schedule of ")
_IN_WORDS = re.compile(r"(?:Instruction|Schedule|No instruction|Computation|For thread) .*")  # after XLA's condition
_NO_TIMES = "its schedule, the order of its instructions, cannot run, so nothing can be estimated"


def of_verified(reason: str, advice: str) -> str:
    """Says what it means that `verify` refuses a module for `reason`. `advice` is what the user should do."""
    return f"{_NO_TIMES}; {advice} ({reason})" if _SCHEDULE.search(reason) else f"{reason}; {advice}"


def of_module(reason: str, advice: str) -> str:
    """Says what it means that XLA refuses a module for `reason`. `advice` is what the user should do."""
    meaning = f"jaxlib {version.__version__} rejects it, so it is damaged, or another version wrote it"
    return f"{_NO_TIMES if _SCHEDULE.search(reason) else meaning}; {advice} (XLA: {_short(reason)})"


def of_stopped(reason: str, advice: str) -> str:
    """Says what it means that XLA's parser ended its process, or was ended because of its limits."""
    meaning = "XLA's parser stops, so it is damaged, or too large"
    return f"{_NO_TIMES if _SCHEDULE.search(reason) else meaning}; {advice} ({_short(reason)})"


def of_text(text: str, error: str, first_line: int, instead: str) -> str:
    """Says why XLA's parser cannot read a module, for a sentence that begins with the name of its file.

    Args:
      text: the module, without the text before and after it.
      error: XLA's message, which has several lines.
      first_line: the line of the file in which the module begins.
      instead: which file to give instead.
    """
    if (unknown := _UNKNOWN_NAME.search(error)) is not None:
        return _of_order(text, int(unknown[1]), unknown[2], first_line)
    found = _PARSING.search(error)
    where = f"line {first_line + int(found[1]) - 1}" if found else "some line"
    reason = f" (XLA: {found[2].partition('. Allowed attributes')[0]})" if found else ""
    return (
        f"is HLO text that jaxlib {version.__version__} cannot read from {where} on: it is damaged, or another version "
        f"wrote it; {instead}{reason}"
    )


def _of_order(text: str, line: int, name: str, first_line: int) -> str:
    """Says that an instruction in a line of `text` needs `name`, which no line above it makes."""
    here = first_line + line - 1
    below = _line_that_makes(text, name, line)
    if below is None:
        return (
            f"lacks a line: line {here} needs {name}, which no line of its computation makes; dump or copy it again "
            f"(XLA: instruction does not exist: {name})"
        )
    there = first_line + below - 1
    return (
        f"cannot run in the order of its lines: line {here} needs {name}, but line {there} makes it; put line {there} "
        f"above line {here}, or dump it again (XLA: instruction does not exist: {name})"
    )


def _line_that_makes(text: str, name: str, after: int) -> int | None:
    """The line below line `after`, in the same computation, that makes `name`. Lines count from 1."""
    makes = re.compile(rf"\s*(?:ROOT )?%?{re.escape(name)} = ")
    for number, line in enumerate(text.split("\n")[after:], after + 1):
        if line.startswith("}"):
            return None
        if makes.match(line):
            return number
    return None


def _short(reason: str) -> str:
    """XLA's reason without the place and the condition in XLA's source code, if words follow them."""
    told = _CHECK.sub("", reason)
    words = _IN_WORDS.search(told)
    return words[0] if words else told
