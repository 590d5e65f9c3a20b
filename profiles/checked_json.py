"""JSON files that people read, one fact a line, and that strangers write: each value is read through a check.

Errors say where it stands:

    top = parse(text, "h200-nvlink.json").mapping()
    samples = top["alone"].sequence()[0].integer(least=1)
    # h200-nvlink.json: alone.0 must be a whole number from 1 to 1000000000, not -3: correct it, or profile again

JSON itself is only data; what is left to guard against is size, depth, NaN, text that a terminal would obey, and
numbers outside of what they mean. Files are profiles unless `parse` is told another `Kind`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dhelix.errors import DhelixError

MAX_BYTES = 64 << 20
_MAX_ENTRIES = 1_000_000
_MAX_CHARACTERS = 1000
_MAX_COUNT = 10**9


class ProfileFileError(DhelixError):
    """A file is no profile, or not one that this version can read."""


def json_text(value: Any) -> str:
    """A value in one line."""
    return json.dumps(value, ensure_ascii=False)


def json_lines(opening: str, items: Iterable[str], closing: str) -> str:
    """A list or an object with an item on each line, so that files can be read, edited and compared."""
    text = ",\n".join(items)
    return f"{opening}\n{text}\n{closing}" if text else opening + closing


@dataclass(frozen=True, slots=True)
class Kind:
    """What a file is meant to be, for messages: its `name`, how one gets a good one, and which error it raises."""

    name: str = "profile"
    again: str = "profile again"
    error: type[DhelixError] = ProfileFileError


PROFILE = Kind()


def parse(text: str, origin: str, kind: Kind = PROFILE) -> Checked:
    """The value that a text holds, unchecked so far. Raises `kind.error`, which calls the text `origin`."""

    def refuse(constant: str) -> None:
        raise kind.error(f"{origin}: {constant} is no number of a {kind.name}: {kind.again}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for n, (name, _) in enumerate(pairs) if any(name == later for later, _ in pairs[n + 1 :]))
            raise kind.error(f"{origin}: an object has the field {ascii(twice[:80])} twice: remove one of them")
        return found

    if len(text) > MAX_BYTES:
        raise kind.error(f"{origin}: {len(text) >> 20} MiB are too large for a {kind.name}: not read")
    try:
        return Checked(json.loads(text, parse_constant=refuse, object_pairs_hook=unique), origin, kind=kind)
    except kind.error:
        raise
    except json.JSONDecodeError as error:
        cut = not text[error.pos :].strip() or error.msg.startswith("Unterminated")
        what = "ends too early" if cut else f"is no JSON ({error.msg})"
        raise kind.error(
            f"{origin}: line {error.lineno}: {what}: restore the file, or delete it and {kind.again}"
        ) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists in lists
        raise kind.error(f"{origin}: JSON, but no {kind.name}: check the path") from None


def check_schema(top: Checked, known: int) -> None:
    """Raises the error of its kind unless `top` is an object with a `schema` of at most `known`."""
    schema, kind = top.mapping().get("schema"), top.kind
    if schema is None:
        raise kind.error(f'{top.origin}: JSON, but no {kind.name} (it has no "schema"): check the path')
    if schema.integer(1) > known:
        raise kind.error(
            f"{top.origin}: written by a newer dhelix (schema {schema.value}; this one reads {known}): upgrade dhelix,"
            f" or {kind.again}"
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """A value, the file it is from and the way to it. Each method is a check and returns what it has checked."""

    value: Any
    origin: str
    way: tuple[object, ...] = ()
    kind: Kind = PROFILE

    def error(self, what: str) -> DhelixError:
        """`what` completes "<place> must ..."."""
        if isinstance(self.value, str):
            shown = ascii(self.value[:80])
        else:
            shown = str(self.value)[:80] if isinstance(self.value, float | int) else type(self.value).__name__
        return self.kind.error(f"{self.place} {what}, not {shown}: correct it, or {self.kind.again}")

    @property
    def place(self) -> str:
        steps = (str(step) if isinstance(step, int) else ascii(str(step)[:80])[1:-1] for step in self.way)
        return f"{self.origin}: {'.'.join(steps) or 'the file'}"

    def mapping(self, limit: int = _MAX_ENTRIES) -> dict[str, Checked]:
        """The fields of an object; their names are checked as text is."""
        if not isinstance(self.value, dict) or len(self.value) > limit:
            raise self.error(f"must be an object of at most {limit} fields")
        for name in self.value:
            self._inside("name of a field", name).text()
        return {name: self._inside(name, value) for name, value in self.value.items()}

    def sequence(self, shortest: int = 0) -> list[Checked]:
        if not isinstance(self.value, list) or not shortest <= len(self.value) <= _MAX_ENTRIES:
            raise self.error(f"must be a list of {shortest} to {_MAX_ENTRIES} entries")
        return [self._inside(i, value) for i, value in enumerate(self.value)]

    def _inside(self, step: object, value: Any) -> Checked:
        return Checked(value, self.origin, (*self.way, step), self.kind)

    def text(self) -> str:
        if not isinstance(self.value, str) or len(self.value) > _MAX_CHARACTERS or not self.value.isprintable():
            raise self.error(f"must be printable text of at most {_MAX_CHARACTERS} characters")
        return self.value

    def number(self, largest: float) -> float:
        """From 0 to `largest`."""
        good = isinstance(self.value, float | int) and not isinstance(self.value, bool)
        if not good or not 0 <= self.value <= largest:
            raise self.error(f"must be a number from 0 to {largest:g}")
        return self.value

    def integer(self, least: int = 0, largest: int = _MAX_COUNT) -> int:
        good = isinstance(self.value, int) and not isinstance(self.value, bool)
        if not good or not least <= self.value <= largest:
            raise self.error(f"must be a whole number from {least} to {largest}")
        return self.value
