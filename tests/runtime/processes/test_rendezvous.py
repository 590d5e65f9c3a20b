"""Rendezvous of many processes, here threads around a store in memory: all get the verdict, or all stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from dhelix.errors import DhelixError, HostsDisagreeError
from dhelix.runtime.processes import agreement, rendezvous
from dhelix.runtime.processes.rendezvous import Job, Said
from dhelix.tests.machine import slowness

MANY = 12


class Store:
    """A stand-in for the client of JAX's coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.calls = 0
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            self.calls += 1
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        with self._changed:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
            return self.values[key]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            self.calls += 1
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            return [item for item in self.values.items() if item[0].startswith(key)]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values = {name: value for name, value in self.values.items() if not name.startswith(key)}


def jobs(count: int = MANY) -> list[Job]:
    """Jobs around one store, as each process sees it."""
    store = Store()
    return [Job(store, tuple(range(count)), own) for own in range(count)]


def each(processes: Sequence[Job], act: Callable[[Job, int], Any]) -> list[Any]:
    """What `act` returns in each process, or the text of its DhelixError."""

    def outcome(number: int) -> Any:
        try:
            return act(processes[number], number)
        except DhelixError as error:
            return str(error)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(outcome, range(len(processes))))


def texts(said: Sequence[Said]) -> str:
    return " ".join(one.text for one in said)


def test_all_hear_the_verdict() -> None:
    found = each(jobs(), lambda job, number: job.meet("speak", str(number), texts))
    assert found == [" ".join(map(str, range(MANY)))] * MANY


def test_what_was_heard_is_forgotten() -> None:
    processes = jobs()
    for number in range(5):
        assert len(set(each(processes, lambda job, _, n=number: job.meet("speak", str(n), texts)))) == 1
    assert {key.split("/")[2] for key in processes[0].store.values} == {"5"}
    assert processes[0].store.calls <= 4 * MANY * 5


def test_agreement_in_a_job() -> None:
    processes = jobs()
    assert each(processes, lambda job, n: agreement.largest("count", n << 40, job)) == [MANY - 1 << 40] * MANY
    assert each(processes, lambda job, n: agreement.gathered("speak", f"{n}", job)) == [[*map(str, range(MANY))]] * MANY

    def fails_in(numbers: set[int]) -> list[Any]:
        def make(number: int) -> int:
            if number in numbers:
                raise ValueError(f"no room in {number}")
            return number

        return each(processes, lambda job, n: agreement.together("make", lambda: make(n), (ValueError,), job))

    assert fails_in(set()) == list(range(MANY))
    assert fails_in({3, 7}) == ["no room in 3"] * MANY


def test_a_judge_stops_all() -> None:
    def judge(said: Sequence[Said]) -> str:
        raise HostsDisagreeError(f"{len(said)} are too many")

    processes = jobs()
    assert each(processes, lambda job, _: job.meet("speak", "", judge)) == [f"{MANY} are too many"] * MANY
    assert each(processes, lambda job, _: job.meet("speak", "again", lambda said: said[-1].text)) == ["again"] * MANY


@pytest.mark.parametrize("failing", [0, 5])
def test_a_failure_stops_the_others_and_the_numbers_stay_in_step(failing: int) -> None:
    processes = jobs()

    def act(job: Job, number: int) -> str:
        if number == failing:
            job.fail("ValueError: no room")
            return "failed"
        return job.meet("speak", "", texts)

    found = each(processes, act)
    assert found.pop(failing) == "failed"
    assert len(set(found)) == 1 and found[0].startswith(f"process {failing} (")
    assert found[0].endswith("stopped before all processes ran the step: ValueError: no room")
    assert each(processes, lambda job, n: job.meet("speak", str(n), lambda said: str(len(said)))) == [str(MANY)] * MANY


@pytest.mark.parametrize("leaving", [{0}, {5}, {2, 5}])
def test_all_leave_alone_what_one_leaves_alone(leaving: set[int]) -> None:
    processes = jobs()

    def act(job: Job, number: int) -> str:
        try:
            if number in leaving:
                raise OSError("no room")
            return job.meet("run the compiled step 'f'", "", texts)
        except OSError as error:
            return job.leave(f"{error} in {number}", error)
        except rendezvous.LeftAloneError as error:
            return job.leave("the same", error)

    (told,) = set(each(processes, act))
    first = min(leaving)
    assert told.startswith(f"process {first} (") and told.endswith(f"): no room in {first}")
    assert each(processes, lambda job, n: job.meet("speak", str(n), lambda said: str(len(said)))) == [str(MANY)] * MANY


def test_who_leaves_a_step_alone_is_stopped_where_another_one_fails() -> None:
    def act(job: Job, number: int) -> str:
        if number == 2:
            job.fail("ValueError: no room")
            raise DhelixError("failed")
        return job.leave("too slow", TypeError()) if number == 1 else job.meet("run", "", texts)

    found = each(jobs(3), act)
    assert found.pop() == "failed"
    assert all("stopped before all processes ran the step: ValueError: no room" in text for text in found)


def test_processes_that_meet_for_something_else() -> None:
    found = each(jobs(3), lambda job, n: job.meet(f"run step {'ab'[n % 2]!r}", "", texts))
    assert len(set(found)) == 1
    named = found[0].partition(". They")[0]
    assert "process 1" in named and "is about to run step 'b'" in named and " about to run step 'a'" in named


@pytest.mark.parametrize("missing", [{0}, {3, 4}, set(range(4, MANY))])
def test_those_that_do_not_come_are_named(
    missing: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(rendezvous.TIMEOUT, "0.6")
    monkeypatch.setattr(rendezvous, "_FIRST_REPORT", 0.2)
    processes = jobs()
    processes[4].introduce()
    start = time.monotonic()
    found = each(processes, lambda job, n: "" if n in missing else job.meet("run step 'f'", "", texts, times=1))
    assert time.monotonic() - start < 5 * slowness()
    listed = {
        1: "process 0 did",
        2: f"process 3, process 4 ({processes[0]._hosts[0]}) did",
        8: f"process 4 ({processes[0]._hosts[0]}), process 5, process 6, process 7 and 4 more did",
    }[len(missing)]
    assert {text for n, text in enumerate(found) if n not in missing} == {
        f"{listed} not come to run step 'f' within 0.6 s. All processes must run the step with dhelix: check the log "
        "there. DHELIX_AGREEMENT_TIMEOUT=SECONDS waits longer"
    }
    waits = [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()]
    assert any(f"dhelix: waiting for {listed.removesuffix(' did')} to run step 'f', for" in line for line in waits)


def test_one_that_compiles_longer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.TIMEOUT, "0.3")

    def act(job: Job, number: int) -> str:
        time.sleep(0.8 * (number == 1))
        return job.meet("run the compiled step 'f'", "", lambda said: "all")

    assert each(jobs(3), act) == ["all"] * 3


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
def test_a_timeout_that_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.TIMEOUT, value)
    with pytest.raises(DhelixError, match=f"DHELIX_AGREEMENT_TIMEOUT='{value}': give a number of seconds"):
        rendezvous.timeout()


def test_a_timeout_that_is_none_in_one_process_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def timeout() -> float:
        if threading.current_thread().name == "1":
            raise DhelixError("no time")
        return 5.0

    def act(job: Job, number: int) -> str:
        threading.current_thread().name = str(number)
        try:
            return job.meet("run step 'f'", "", texts)
        except HostsDisagreeError as error:
            return str(error)
        except DhelixError as error:
            job.fail(str(error))
            return "failed"

    monkeypatch.setattr(rendezvous, "timeout", timeout)
    first, *others = each(jobs(3), act)
    assert first.endswith("stopped before all processes ran the step: no time") and others == ["failed", first]


def test_a_store_that_is_gone() -> None:
    job = jobs(2)[1]

    def gone(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    job.store.key_value_set = gone
    with pytest.raises(HostsDisagreeError, match="cannot ask the other processes .* UNAVAILABLE"):
        job.meet("run step 'f'", "", texts)
    job.fail("ValueError: no room")  # only logs, and raises nothing


def test_a_job_of_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert rendezvous.everyone() is None and rendezvous.of([0]) is None
    assert rendezvous.of([0, 1]) is None and not caplog.records, "a program for other machines"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert rendezvous.of([0, 1]) is None
    assert "jax.distributed.initialize() was not called" in caplog.text
