"""The first difference between the records of processes, in words."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dhelix.errors import HostsDisagreeError
from dhelix.runtime.processes import records
from dhelix.runtime.processes.records import Entry
from dhelix.runtime.processes.rendezvous import Said


def entries(**values: str | Mapping[str, str]) -> list[Entry]:
    return [Entry(what, value) for what, value in values.items()]


def difference(*said: list[Entry]) -> str:
    """The error message up to the end of the difference; empty if the records agree."""
    hosts = ("a", "b", "c", "c", "c", "c", "c")
    texts = [Said(n, hosts[n], "run step 'f'", records.dumps(record)) for n, record in enumerate(said)]
    try:
        assert records.check(texts) == ""
        return ""
    except HostsDisagreeError as error:
        return str(error).partition(". They are about to run step 'f'")[0]


def test_equal_records() -> None:
    assert difference(entries(schedule="dp"), entries(schedule="dp")) == ""
    assert difference([Entry("order", "1", "of one program")], [Entry("order", "1", "of another one")]) == ""


def test_the_first_difference_counts() -> None:
    one, other = (entries(schedule="dp", skew=skew, reduce=reduce) for skew, reduce in (("0", "sum"), ("1", "mean")))
    assert difference(one, other) == "hosts disagree on skew: 0 in process 0 (a); 1 in process 1 (b)"


def test_of_several_values_the_first_name_that_differs() -> None:
    one, other = (entries(XLA_FLAGS=flags) for flags in ({"--b": "1", "--c": "2"}, {"--a": "3", "--b": "1"}))
    assert difference(one, other) == "hosts disagree on XLA_FLAGS --a: not given in process 0 (a); 3 in process 1 (b)"
    assert difference(entries(passes={}), entries(passes={"1 x": "{}"})).endswith(
        "passes 1 x: not given in process 0 (a); {} in process 1 (b)"
    )
    assert difference(entries(passes="none"), entries(passes={"1 x": "{}", "2 y": "{}"})).endswith(
        "passes: none in process 0 (a); 1 x, 2 y in process 1 (b)"
    )


def test_an_entry_that_one_version_of_dhelix_lacks() -> None:
    told = "hosts disagree on skew: not given in process 0 (a); 0 in process 1 (b)"
    assert difference(entries(schedule="dp"), entries(schedule="dp", skew="0")) == told


def test_notes_and_many_processes() -> None:
    one, other = [Entry("DHELIX", "on")], [Entry("DHELIX", "off", "by an option of JAX")]
    assert difference(one, other, *[other] * 5) == (
        "hosts disagree on DHELIX: on in process 0 (a); off (by an option of JAX) in process 1 (b), process 2 (c),"
        " process 3 (c), process 4 (c) and 2 more"
    )


@pytest.mark.parametrize("length", [120, 121])
def test_long_values_are_shown_by_their_beginning(length: int) -> None:
    assert records.short("x" * length).startswith("x" * 60)
    assert (records.short("x" * length) == "x" * length) == (length == 120)
    assert records.short("x" * 200) != records.short("x" * 201)
