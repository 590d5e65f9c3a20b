"""Reads and checks JSON files. People read these files, and strangers may have written them.

A msgspec type describes what a file may contain:

    class File(Struct):
        setting: Text
        samples: Annotated[int, Meta(ge=1)]

    file = decode(text, File, "h200-nvlink.json")
    # ProfileFileError: h200-nvlink.json: samples: expected `int` >= 1: correct it, or profile again

A JSON file contains only data, no code. The remaining risks are size, depth, NaN, duplicate fields, text with terminal
control characters, and numbers outside of their range. This module checks for them. A `Kind` says what a file is called
in error messages; the default is a profile. A `Row` describes a JSON list with a type for each position. If a later
version appends entries to the list, this version ignores them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from dhelix.errors import DhelixError

MAX_BYTES = 64 << 20
_MAX_CHARACTERS = 1000
_MISSING = re.compile(r"Object missing required field (`\w+`)")
_AT = re.compile(r" - at `(?:key in )?\$([^`]*)`$")


class ProfileFileError(DhelixError):
    """A file is not a valid profile or file of times, or this version cannot read it."""


class Text(str):
    """Printable text of at most 1000 characters."""

    __slots__ = ()


class Row(Struct, array_like=True, frozen=True, gc=False):
    """A JSON list in which each position has its own type."""


Count = Annotated[int, Meta(ge=1, le=10**9)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
Position = Annotated[int, Meta(ge=0)]
Microseconds = Annotated[float, Meta(ge=0, le=1e10)]
Share = Annotated[float, Meta(ge=0, le=1)]


class On(Struct, omit_defaults=True):
    """A `profile.Provenance` (machine and software of a measurement) as it stands in a file."""

    gpu: Text = Text()
    gpus: Count = 1
    date: Text = Text()
    driver: Text = Text()
    cuda: Text = Text()
    nccl: Text = Text()
    jax: Text = Text()
    machine: Text = Text()


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of file is called in error messages, and which error is raised.

    Attributes:
      name: name of this kind of file.
      again: advice on how to get a valid file, at the end of error messages.
      error: type of the error that an invalid file raises.
    """

    name: str = "profile"
    again: str = "profile again"
    error: type[DhelixError] = ProfileFileError


PROFILE = Kind()


def json_text(value: Any) -> str:
    """A value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False)


def json_lines(opening: str, items: Iterable[str], closing: str) -> str:
    """A JSON list or object with one item per line, so that people can read, edit and compare files."""
    text = ",\n".join(items)
    return f"{opening}\n{text}\n{closing}" if text else opening + closing


def document(fields: Mapping[str, str]) -> str:
    """The text of a file with these fields. The values of `fields` are JSON texts."""
    return "{\n" + ",\n".join(f"{json_text(name)}: {value}" for name, value in fields.items()) + "\n}\n"


def microseconds_text(seconds: float, digits: int = 5) -> str:
    """A time in seconds as text in microseconds, with `digits` significant digits.

    Files have five digits for a time and three for a spread.
    """
    value = seconds * 1e6
    return number_text(float(f"{value:.{digits}g}") if math.isfinite(value) else value)


def number_text(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(float(value))


def decode[T](text: str, type: type[T], origin: str, schema: int, kind: Kind = PROFILE, oldest: int = 1) -> T:
    """Parses and checks JSON text, and returns its contents as an object of `type`.

    Args:
      origin: name of the text in error messages.
      schema, oldest: newest and oldest schema (version of the format) that this version of dhelix reads.
      kind: kind of the file.

    Raises:
      kind.error: the text is not valid. The message says where the error is.
    """
    data = _parse(text, origin, kind)
    _check_schema(data, origin, oldest, schema, kind)
    try:
        return msgspec.convert(data, type, dec_hook=_text)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise wrong(origin, str(error), kind) from None


def wrong(origin: str, message: str, kind: Kind = PROFILE) -> DhelixError:
    """The error of `kind` for an invalid file.

    Args:
      message: what is wrong. It may end with a place in the file, as msgspec writes it: - at `$.a[0].b`.
    """
    found = _AT.search(message)
    place = re.sub(r"\[(\d+|\*)\]", r".\1", found[1].replace("...", "*")).strip(".") if found else ""
    what = _MISSING.sub(r"\1 is missing", _AT.sub("", message))
    said = f"{place or 'the file'}: {what[:1].lower()}{what[1:]}"
    return kind.error(f"{origin}: {ascii(said)[1:-1][:200]}: correct it, or {kind.again}")


def names(mapping: Mapping[str, Any], place: str, origin: str, kind: Kind = PROFILE) -> None:
    """Checks that the names of an object's fields are valid `Text`. msgspec does not check these names.

    Raises:
      kind.error: a name is too long, or is not printable.
    """
    for name in mapping:
        try:
            _text(Text, name)
        except ValueError as error:
            raise wrong(origin, f"name of a field: {error} - at `$.{place}`", kind) from None


def _text(type: type, value: Any) -> Any:
    if type is not Text:
        raise NotImplementedError
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS or not value.isprintable():
        raise ValueError(f"expected printable text of at most {_MAX_CHARACTERS} characters")
    return Text(value)


def _parse(text: str, origin: str, kind: Kind) -> Any:
    def refuse(constant: str) -> None:
        raise kind.error(f"{origin}: {constant} is not a number that a {kind.name} may hold: {kind.again}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for n, (name, _) in enumerate(pairs) if any(name == later for later, _ in pairs[n + 1 :]))
            raise kind.error(f"{origin}: an object has the field {ascii(twice[:80])} twice: remove one of them")
        return found

    if len(text) > MAX_BYTES:
        raise kind.error(f"{origin}: {len(text) >> 20} MiB are too large for a {kind.name}: check the path")
    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except kind.error:
        raise
    except json.JSONDecodeError as error:
        cut = not text[error.pos :].strip() or error.msg.startswith("Unterminated")
        what = "ends too early" if cut else f"is not JSON ({error.msg})"
        raise kind.error(
            f"{origin}: line {error.lineno}: {what}: restore the file, or delete it and {kind.again}"
        ) from None
    except (ValueError, RecursionError):  # a number with thousands of digits, or deeply nested lists
        raise kind.error(f"{origin}: JSON, but not a {kind.name}: check the path") from None


def _check_schema(data: Any, origin: str, oldest: int, known: int, kind: Kind) -> None:
    if not isinstance(data, dict):
        raise kind.error(f"{origin}: JSON, but not an object, so not a {kind.name}: check the path")
    schema = data.get("schema")
    if schema is None:
        raise kind.error(f'{origin}: JSON, but not a {kind.name} (it has no "schema"): check the path')
    if type(schema) is not int or schema < 1:
        raise wrong(origin, "Expected a whole number from 1 - at `$.schema`", kind)
    if schema < oldest:
        raise kind.error(
            f"{origin}: written by an older dhelix (schema {schema}; this one reads {known}): {kind.again}"
        )
    if schema > known:
        raise kind.error(
            f"{origin}: written by a newer dhelix (schema {schema}; this one reads {known}): upgrade dhelix, or"
            f" {kind.again}"
        )
