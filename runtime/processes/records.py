"""Defines the records that processes compare, and the message that describes their first difference.

A record is a list of properties (`Entry`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dhelix.errors import HostsDisagreeError
from dhelix.passes.framework import fingerprint
from dhelix.runtime.processes.rendezvous import Said, names_of

NOT_GIVEN = "not given"
_LONGEST = 120  # characters; messages shorten longer values


@dataclass(frozen=True)
class Entry:
    """One property that must be equal in all processes.

    Attributes:
      what: name of the property; unique in a record.
      value: the value to compare. It is a short text, or a map from names to short texts.
      note: text that messages show next to the value. It is not compared.
      advice: what the user should do if processes differ.
    """

    what: str
    value: str | Mapping[str, str]
    note: str = ""
    advice: str = "Start every process with the same source, options, files, flags and package versions"

    def of(self, name: str) -> str:
        """Returns the text called `name`, or NOT_GIVEN if there is none.

        If the value is a single text, returns this text for every name. If the value is a map and `name` is "", returns
        the names in the map as one text.
        """
        if isinstance(self.value, str):
            return self.value
        return self.value.get(name, NOT_GIVEN) if name else ", ".join(self.value) or NOT_GIVEN


type Record = Sequence[Entry]


def short(text: str) -> str:
    """Returns `text`. If it is long, returns its beginning and a digest of the whole text."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... ({fingerprint.of_bytes(text.encode())})"


def dumps(record: Record) -> str:
    return json.dumps([[entry.what, entry.value, entry.note, entry.advice] for entry in record])


def loads(text: str) -> Record:
    return [Entry(*fields) for fields in json.loads(text)]


def check(said: Sequence[Said]) -> str:
    """Raises HostsDisagreeError for the first entry that differs, in the order of the entries.

    This is a `judge` for `Job.meet`. It returns "" if all records are equal.
    """
    if len({one.text for one in said}) == 1:
        return ""
    records = [{entry.what: entry for entry in loads(one.text)} for one in said]
    for what in dict.fromkeys(what for record in records for what in record):
        entries = [record.get(what, Entry(what, NOT_GIVEN)) for record in records]
        for name in _names(entries):
            if len({entry.of(name) for entry in entries}) > 1:
                raise HostsDisagreeError(_message(f"{what} {name}".rstrip(), name, entries, said))
    return ""


def _names(entries: Sequence[Entry]) -> list[str]:
    """The names of an entry's texts in all processes. If some process has a single text, the only name is ""."""
    several = [entry.value for entry in entries if not isinstance(entry.value, str)]
    if len(several) < len(entries):
        return [""]
    return sorted({name for values in several for name in values})


def _message(what: str, name: str, entries: Sequence[Entry], said: Sequence[Said]) -> str:
    members: dict[str, list[tuple[int, str]]] = {}
    notes: dict[str, str] = {}
    for entry, one in zip(entries, said, strict=True):
        value = entry.of(name)
        members.setdefault(value, []).append((one.process, one.host))
        notes.setdefault(value, f" ({entry.note})" if entry.note else "")
    listed = "; ".join(f"{value}{notes[value]} in {names_of(ones)}" for value, ones in members.items())
    advice = next(entry.advice for entry in entries if entry.value != NOT_GIVEN)
    return f"hosts disagree on {what}: {listed}. They are about to {said[0].purpose} and would deadlock. {advice}"
