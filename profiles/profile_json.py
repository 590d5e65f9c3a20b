"""The text of a profile's file: JSON to be read and compared by people, one fact a line.

Keys stand once, in a table; what was measured refers to them by their position, from 0. Times are microseconds
with five digits, spreads with three:

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
    [0, 171.03, 0.62, 40, "alone"],                    key, time, spread, samples, how it was measured
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

Equal profiles give equal text, and reading and writing it again changes nothing. Every field is checked for type,
range and length. Fields and ends of lists that this version does not know are left aside, so that a later version
may add some; what it must not misread gets a higher `schema`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from dhelix.errors import DhelixError
from dhelix.profiles import checked_json, keys
from dhelix.profiles.checked_json import Checked, ProfileFileError, json_lines, json_text
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Provenance, Section, Timing

SCHEMA = 1

_SOURCES = ("alone", "trace")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MAX_SECTIONS = 64
_MAX_REASON = 300
_MAX_MICROSECONDS = 1e10
_MAX_WORK = 1e24  # operations of one operator
_MAX_BYTES = 2**62


def dumps(profile: Profile) -> str:
    """The text of a file. Raises ProfileFileError for a profile that `loads` would not take, such as one with NaN."""
    table = sorted(_all_keys(profile.sections.values()), key=_key_order)
    index = {key: i for i, key in enumerate(table)}
    sections = [
        f"{json_text(name)}: {{\n{_section_text(profile.sections[name], index)}}}" for name in sorted(profile.sections)
    ]
    parts = [
        f'"schema": {SCHEMA}',
        f'"hardware": {json_text(profile.hardware)}',
        f'"link": {json_text(profile.link)}',
        f'"measured_on": {json_lines("[", map(_provenance_text, profile.measured_on), "]")}',
        f'"keys": {json_lines("[", map(_key_text, table), "]")}',
        f'"sections": {json_lines("{", sections, "}")}',
    ]
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    loads(text, "this profile")
    return text


def _all_keys(sections: Iterable[Section]) -> set[Key]:
    """Each key once; of equal ones that which says how much work it is."""
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
    parts = [] if section.gap_seconds is None else [f'"gap_us": {_microseconds(section.gap_seconds)}']
    parts += [
        f'"alone": {json_lines("[", (_timing_text(i, alone[i]) for i in sorted(alone)), "]")}',
        f'"pairs": {json_lines("[", (_pair_text(*ij, pairs[ij]) for ij in sorted(pairs)), "]")}',
        f'"failures": {json_lines("{", failures, "}")}',
    ]
    return ",\n".join(parts)


def _timing_text(key: int, timing: Timing) -> str:
    seconds, spread = _microseconds(timing.seconds), _microseconds(timing.spread, 3)
    return f"[{key}, {seconds}, {spread}, {timing.samples}, {json_text(timing.source)}]"


def _pair_text(first: int, second: int, timing: PairTiming) -> str:
    times = ", ".join(_microseconds(t) for t in _pair_times(timing))
    return f"[{first}, {second}, {times}, {_microseconds(timing.spread, 3)}, {timing.samples}]"


def _pair_times(timing: PairTiming) -> tuple[float, ...]:
    return timing.seconds, timing.first, timing.second, timing.first_alone, timing.second_alone


def _key_text(key: Key) -> str:
    if isinstance(key, OperatorKey):
        return f"[{json_text(str(key))}, {_number(key.flops)}, {key.bytes}]"
    return f"[{json_text(str(key))}]"


def _provenance_text(provenance: Provenance) -> str:
    values = {field.name: getattr(provenance, field.name) for field in fields(provenance)}
    return json_text({name: value for name, value in values.items() if value != ""})


def _microseconds(seconds: float, digits: int = 5) -> str:
    value = seconds * 1e6
    return _number(float(f"{value:.{digits}g}") if math.isfinite(value) else value)


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(float(value))


def _one_line(reason: str) -> str:
    """An error message as a file may hold it."""
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return " ".join(printable.split())[:_MAX_REASON]


def loads(text: str, origin: str) -> Profile:
    """The profile in the text of a file; errors call the text `origin`.

    Raises ProfileFileError for all that is not a sound profile of a known schema.
    """
    whole = checked_json.parse(text, origin)
    checked_json.check_schema(whole, SCHEMA)
    top = whole.mapping()
    hardware, link = (_name(top, field, origin) for field in ("hardware", "link"))
    table = [_key(row) for row in _rows(top, "keys")]
    if len(set(table)) != len(table):
        raise ProfileFileError(f"{origin}: keys: one of them stands there twice: remove it, or profile again")
    sections = top["sections"].mapping(_MAX_SECTIONS) if "sections" in top else {}
    measured_on = tuple(_provenance(row) for row in _rows(top, "measured_on"))
    return Profile(hardware, link, measured_on, {name: _section(name, v, table) for name, v in sections.items()})


def _name(top: Mapping[str, Checked], field: str, origin: str) -> str:
    """Hardware and link are parts of a file's name, so they may hold no path."""
    if field not in top:
        raise ProfileFileError(f'{origin}: "{field}" is missing: restore it, or profile again')
    text = top[field].text()
    if not _NAME.fullmatch(text):
        raise top[field].error("must be a name of letters, digits, - and _")
    return text


def _rows(values: Mapping[str, Checked], name: str) -> list[Checked]:
    return values[name].sequence() if name in values else []


def _seconds(microseconds: Checked) -> float:
    return microseconds.number(_MAX_MICROSECONDS) / 1e6


def _key(row: Checked) -> Key:
    name, *work = row.sequence(1)
    text = name.text()
    try:
        key = keys.parse(text)
    except DhelixError:
        raise name.error("must be the key of an operator or a collective") from None
    if isinstance(key, CollectiveKey):
        sizes = (key.bytes, key.group_size, key.groups)
    else:
        sizes = key.sizes
        if len(work) < 2:
            raise row.error("must be [key, operations, bytes]")
        key = replace(key, flops=float(work[0].number(_MAX_WORK)), bytes=work[1].integer(0, _MAX_BYTES))
    if str(key) != text or any(size > _MAX_BYTES for size in sizes):
        raise name.error("must be a key as dhelix writes it")
    return key


def _provenance(row: Checked) -> Provenance:
    values = row.mapping()
    texts = {f.name: values[f.name].text() for f in fields(Provenance) if f.name in values and f.name != "gpus"}
    gpus = values["gpus"].integer(1) if "gpus" in values else 1
    return Provenance(**{"gpu": "", **texts}, gpus=gpus)


def _section(name: str, value: Checked, table: Sequence[Key]) -> Section:
    values = value.mapping()
    alone = _unique((_timing(row, table), row) for row in _rows(values, "alone"))
    failures = values["failures"].mapping() if "failures" in values else {}
    return Section(
        name,
        {key: timing for key, timing in alone.items() if isinstance(key, OperatorKey)},
        {key: timing for key, timing in alone.items() if isinstance(key, CollectiveKey)},
        _unique((_pair(row, table), row) for row in _rows(values, "pairs")),
        _seconds(values["gap_us"]) if "gap_us" in values else None,
        {key: why.text() for key, why in failures.items()},
    )


def _unique[K, V](entries: Iterable[tuple[tuple[K, V], Checked]]) -> dict[K, V]:
    result: dict[K, V] = {}
    for (key, timing), row in entries:
        if key in result:
            raise ProfileFileError(f"{row.place}: a second time of {key}: remove one, or profile again")
        result[key] = timing
    return result


def _timing(row: Checked, table: Sequence[Key]) -> tuple[Key, Timing]:
    key, seconds, spread, samples, source, *_ = row.sequence(5)
    if source.value not in _SOURCES:
        raise source.error(f"must be one of {', '.join(_SOURCES)}")
    timing = Timing(_seconds(seconds), _seconds(spread), samples.integer(1), source.value)
    return _referred(key, table), timing


def _pair(row: Checked, table: Sequence[Key]) -> tuple[PairKey, PairTiming]:
    first, second, whole, of_first, of_second, first_alone, second_alone, spread, samples, *_ = row.sequence(9)
    timing = PairTiming(
        _seconds(whole),
        _seconds(of_first),
        _seconds(of_second),
        _seconds(first_alone),
        _seconds(second_alone),
        _seconds(spread),
        samples.integer(1),
    )
    return PairKey(_referred(first, table), _referred(second, table)), timing


def _referred(position: Checked, table: Sequence[Key]) -> Key:
    if not table:
        raise position.error("must be the position of a key, and there are no keys")
    return table[position.integer(0, len(table) - 1)]
