"""The text of a profile's file: JSON with one fact per line, so that people can read and compare files.

A key identifies an operator or a collective (`keys.py`). Each key appears once, in a table. Measurements refer to a key
by its position in the table, counted from 0. Times are in microseconds, with five significant digits. Spreads have
three significant digits:

    {
    "schema": 1,
    "hardware": "H200",
    "link": "nvlink",
    "measured_on": [
    {"gpu": "NVIDIA H200", "gpus": 4, "date": "2026-01-31", "nccl": "2.28.9", ...}
    ],
    "keys": [
    ["gemm bf16,bf16->bf16:nt:cublaslt 8192x4096x1536", 103079215104, 92274688],  an operator, operations, bytes
    ["all-gather 67108864B 4x1 groups=1 nccl"]
    ],
    "sections": {
    "default": {
    "gap_us": 1.2,
    "alone": [
    [0, 171.03, 0.62, 40, "alone"],                    key, time, spread, samples, source
    [1, 245.8, 3.1, 40, "trace"]
    ],
    "pairs": [
    [0, 1, 301.5, 236.2, 298.1, 171, 246, 4.7, 20]     first, second, time of both, of each side, of each alone,
                                                       spread, samples
    ],
    "failures": {
    "<key or pair as text>": "out of memory"
    }}
    }
    }

Equal profiles give equal text. If dhelix reads a file that this version has written, and writes it again, it does not
change. The type, range and length of every field are checked (`codec`). Unknown fields, and unknown entries at the end
of a list, are ignored, so a later version may add them. A later version increases `schema` if this version would
misunderstand its files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from dhelix.errors import DhelixError
from dhelix.profiles import keys
from dhelix.profiles.files import codec
from dhelix.profiles.files.codec import (
    Bytes,
    Count,
    Microseconds,
    On,
    Position,
    Row,
    Text,
    json_lines,
    json_text,
    microseconds_text,
    number_text,
)  # fmt: skip
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Provenance, Section, Timing

SCHEMA = 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MAX_REASON = 300


class _Key(Row, frozen=True):
    """A key in the table of keys. `flops` and `bytes` are None for the key of a collective."""

    text: Text
    flops: Annotated[float, Meta(ge=0, le=1e24)] | None = None
    bytes: Bytes | None = None


class _Alone(Row, frozen=True):
    key: Position
    seconds: Microseconds
    spread: Microseconds
    samples: Count
    source: Literal["alone", "trace"]


class _Pair(Row, frozen=True):
    first: Position
    second: Position
    whole: Microseconds
    of_first: Microseconds
    of_second: Microseconds
    first_alone: Microseconds
    second_alone: Microseconds
    spread: Microseconds
    samples: Count


class _Section(Struct):
    gap_us: Microseconds | None = None
    alone: list[_Alone] = []
    pairs: list[_Pair] = []
    failures: dict[str, Text] = {}


class _File(Struct):
    hardware: Text
    link: Text
    measured_on: list[On] = []
    keys: list[_Key] = []
    sections: Annotated[dict[str, _Section], Meta(max_length=64)] = {}


def dumps(profile: Profile) -> str:
    """The text of a file with this profile.

    Raises:
      ProfileFileError: `loads` would reject the text, for example because a time is NaN.
    """
    table = sorted(_all_keys(profile.sections.values()), key=_key_order)
    index = {key: i for i, key in enumerate(table)}
    sections = [
        f"{json_text(name)}: {{\n{_section_text(profile.sections[name], index)}}}" for name in sorted(profile.sections)
    ]
    text = codec.document(
        {
            "schema": str(SCHEMA),
            "hardware": json_text(profile.hardware),
            "link": json_text(profile.link),
            "measured_on": json_lines("[", map(provenance_text, profile.measured_on), "]"),
            "keys": json_lines("[", map(_key_text, table), "]"),
            "sections": json_lines("{", sections, "}"),
        }
    )
    loads(text, "this profile")
    return text


def _all_keys(sections: Iterable[Section]) -> set[Key]:
    """All keys of the sections, each once.

    Equal keys may differ in `flops` and `bytes`. Of these, the key with the most operations is taken. If the numbers of
    operations are equal, the key with the most bytes is taken.
    """
    found: dict[Key, Key] = {}
    for section in sections:
        sides = (side for pair in section.pairs for side in (pair.first, pair.second))
        for key in (*section.operators, *section.collectives, *sides):
            known = found.get(key)
            if known is None or _work(key) > _work(known):
                found[key] = key
    return set(found.values())


def _work(key: Key) -> tuple[float, int]:
    return (key.flops, key.bytes) if isinstance(key, OperatorKey) else (0.0, 0)


def _key_order(key: Key) -> tuple[Any, ...]:
    is_collective = isinstance(key, CollectiveKey)
    return is_collective, tuple(getattr(key, field.name) for field in fields(key) if field.compare)


def _section_text(section: Section, index: Mapping[Key, int]) -> str:
    alone = {index[key]: timing for part in (section.operators, section.collectives) for key, timing in part.items()}
    pairs = {(index[pair.first], index[pair.second]): timing for pair, timing in section.pairs.items()}
    failures = (f"{json_text(key)}: {json_text(_one_line(why))}" for key, why in sorted(section.failures.items()))
    parts = [] if section.gap_seconds is None else [f'"gap_us": {microseconds_text(section.gap_seconds)}']
    parts += [
        f'"alone": {json_lines("[", (_timing_text(i, alone[i]) for i in sorted(alone)), "]")}',
        f'"pairs": {json_lines("[", (_pair_text(*ij, pairs[ij]) for ij in sorted(pairs)), "]")}',
        f'"failures": {json_lines("{", failures, "}")}',
    ]
    return ",\n".join(parts)


def _timing_text(key: int, timing: Timing) -> str:
    seconds, spread = microseconds_text(timing.seconds), microseconds_text(timing.spread, 3)
    return f"[{key}, {seconds}, {spread}, {timing.samples}, {json_text(timing.source)}]"


def _pair_text(first: int, second: int, timing: PairTiming) -> str:
    times = ", ".join(microseconds_text(t) for t in _pair_times(timing))
    return f"[{first}, {second}, {times}, {microseconds_text(timing.spread, 3)}, {timing.samples}]"


def _pair_times(timing: PairTiming) -> tuple[float, ...]:
    return timing.seconds, timing.first, timing.second, timing.first_alone, timing.second_alone


def _key_text(key: Key) -> str:
    if isinstance(key, OperatorKey):
        return f"[{json_text(str(key))}, {number_text(key.flops)}, {key.bytes}]"
    return f"[{json_text(str(key))}]"


def provenance_text(provenance: Provenance) -> str:
    values = {field.name: getattr(provenance, field.name) for field in fields(provenance)}
    return json_text({name: value for name, value in values.items() if value != ""})


def _one_line(reason: str) -> str:
    """The reason for a failed measurement as one printable line of at most 300 characters, as files store it."""
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return " ".join(printable.split())[:_MAX_REASON]


def loads(text: str, origin: str) -> Profile:
    """The profile in the text of a file.

    Args:
      origin: name of the text in error messages.

    Raises:
      ProfileFileError: the text is not a valid profile, or this version does not know its schema.
    """
    file = codec.decode(text, _File, origin, SCHEMA)
    for field in ("hardware", "link"):  # these become parts of a file's name, so they must not contain a path
        if not _NAME.fullmatch(getattr(file, field)):
            raise codec.wrong(origin, f"expected a name of letters, digits, - and _ - at `$.{field}`")
    table = [_key(row, f"`$.keys[{n}]`", origin) for n, row in enumerate(file.keys)]
    if len(set(table)) != len(table):
        raise codec.wrong(origin, "a key occurs twice - at `$.keys`")
    codec.names(file.sections, "sections", origin)
    measured_on = tuple(provenance(on) for on in file.measured_on)
    sections = {name: _section(name, section, table, origin) for name, section in file.sections.items()}
    return Profile(str(file.hardware), str(file.link), measured_on, sections)


def provenance(on: On) -> Provenance:
    texts = {name: str(value) for name, value in structs.asdict(on).items() if name != "gpus"}
    return Provenance(**texts, gpus=on.gpus)


def _key(row: _Key, place: str, origin: str) -> Key:
    text = str(row.text)
    try:
        key = keys.parse(text)
    except DhelixError:
        raise codec.wrong(origin, f"expected the key of an operator or a collective - at {place}") from None
    if isinstance(key, CollectiveKey):
        sizes = (key.bytes, key.group_size, key.groups)
    else:
        sizes = key.sizes
        if row.flops is None or row.bytes is None:
            raise codec.wrong(origin, f"expected [key, operations, bytes] - at {place}")
        key = replace(key, flops=float(row.flops), bytes=row.bytes)
    if str(key) != text or any(size > 2**62 for size in sizes):
        raise codec.wrong(origin, f"expected a key as dhelix writes it - at {place}")
    return key


def _section(name: str, section: _Section, table: Sequence[Key], origin: str) -> Section:
    place = f"$.sections.{name}"
    codec.names(section.failures, f"sections.{name}.failures", origin)
    try:
        alone = [(table[row.key], row) for row in section.alone]
        pairs = [(PairKey(table[row.first], table[row.second]), row) for row in section.pairs]
    except IndexError:
        raise codec.wrong(
            origin, f"expected positions of keys, of which there are {len(table)} - at `{place}`"
        ) from None
    for what, keys_of in (("alone", [key for key, _ in alone]), ("pairs", [key for key, _ in pairs])):
        if len(set(keys_of)) < len(keys_of):
            twice = next(key for key, count in Counter(keys_of).items() if count > 1)
            raise codec.wrong(origin, f"a second time of {twice} - at `{place}.{what}`")
    times = {key: Timing(row.seconds / 1e6, row.spread / 1e6, row.samples, row.source) for key, row in alone}
    return Section(
        name,
        {key: timing for key, timing in times.items() if isinstance(key, OperatorKey)},
        {key: timing for key, timing in times.items() if isinstance(key, CollectiveKey)},
        {key: _pair(row) for key, row in pairs},
        None if section.gap_us is None else section.gap_us / 1e6,
        {key: str(why) for key, why in section.failures.items()},
    )


def _pair(row: _Pair) -> PairTiming:
    ends = row.whole / 1e6, row.of_first / 1e6, row.of_second / 1e6
    return PairTiming(*ends, row.first_alone / 1e6, row.second_alone / 1e6, row.spread / 1e6, row.samples)
