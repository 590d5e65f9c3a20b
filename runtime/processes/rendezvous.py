"""Holds meetings of a job's processes: each sends a text, the first process judges all texts, all receive the verdict.

Meetings use the key-value store of JAX's coordination service, which `jax.distributed.initialize()` starts. A device
collective would wait for ever for a process that does not come. Calls to the store time out, and they work before JAX
has initialized devices.

    dhelix/<job>/<number>/said/<process>    the text of a process, or its failure
    dhelix/<job>/<number>/missing           the processes that the first one waits for, if it waits long
    dhelix/<job>/<number>/verdict           a result for all, or why all stop

Each process counts its meetings, and each text states the purpose of the meeting. So processes that come to the same
number with different purposes get an error. A process that fails reports the failure under the number of its next
meeting, where the others will look. The report counts as a meeting, so the counts of all processes stay equal.
A meeting of n processes takes about 4 n small calls to the store.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from absl import logging

from dhelix.errors import DhelixError, HostsDisagreeError
from dhelix.passes import jax_compat
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.manager import say_once

TIMEOUT = "DHELIX_AGREEMENT_TIMEOUT"
DEFAULT_TIMEOUT = 600.0
AT_WORK = 6
"""Factor on the timeout once all processes are at the step: then some may compile while others use a cache."""

_FIRST_REPORT = 10.0  # seconds until the log names missing processes; each later interval is 3 times as long
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.002, 0.25  # seconds between two reads of the store
_LONGEST_CALL = 1.0  # seconds that one call may wait
_NAMED = 4  # number of processes that a message names; it only counts the others
_LONGEST_ERROR = 400  # characters

Judge = Callable[[Sequence["Said"]], str]


class Said(NamedTuple):
    """What one process says in a meeting."""

    process: int
    host: str
    purpose: str
    text: str
    failed: str = ""  # the error, if the process has failed
    leaves: str = ""  # the reason, if the process leaves the step alone

    @property
    def speaker(self) -> str:
        return name_of(self.process, self.host)


class LeftAloneError(DhelixError):
    """A process of the job leaves the step alone (runs it without passes), so all processes must do so."""


class Job:
    """The processes that run a program together. Each of these processes has a `Job` object of its own."""

    def __init__(self, store: Any, processes: tuple[int, ...], own: int) -> None:
        """
        Args:
          store: client of the coordination service.
          processes: process numbers, ascending; the first process leads.
          own: the number of this process.
        """
        self.store = store
        self.processes = processes
        self._own = own
        listed = ",".join(map(str, processes))
        self._folder = f"dhelix/{listed if len(listed) < 32 else fingerprint.of_bytes(listed.encode())}"
        self._number = 0
        self._first_kept = 0
        self._met: set[str] = set()
        self._hosts = {own: socket.gethostname()}
        self._lock = threading.RLock()

    @property
    def leads(self) -> bool:
        return self._own == self.processes[0]

    def meet(self, purpose: str, text: str, judge: Judge, times: int = AT_WORK) -> str:
        """Holds one meeting. All processes of the job must call this method.

        Args:
          purpose: what all processes are about to do, such as "run step 'f'".
          text: the text of this process.
          judge: maps all texts, in the order of the processes, to the result, or raises HostsDisagreeError. Only the
            first process calls it.
          times: the other processes may take `times * timeout()` seconds to come.

        Returns:
          The result of `judge`, in every process.

        Raises:
          HostsDisagreeError: `judge` raised it, or a process came for another purpose, failed, or did not come in time.
            Every process raises this error.
          LeftAloneError: a process called `leave`. Every process raises this error.
        """
        return self._meet(purpose, judge, times, {"purpose": purpose, "text": text})

    def has_met(self, purpose: str) -> bool:
        """Whether all processes have met for this purpose before. The answer is the same in all processes."""
        return purpose in self._met

    def leave(self, why: str, error: Exception) -> str:
        """Says in the next meeting that this process leaves the step alone. Then all processes leave the step alone.

        Args:
          why: why this process leaves the step alone.
          error: the error because of which the step is left alone. If it is a LeftAloneError, the meeting has already
            taken place.

        Returns:
          The name of the first process that left the step alone, and its reason.

        Raises:
          HostsDisagreeError: a process has failed, or did not come in time. Every process raises this error.
        """
        if isinstance(error, LeftAloneError):
            return str(error)
        try:
            return self._meet("compile the step", lambda _: why, AT_WORK, {"leaves": why})
        except LeftAloneError as first:
            return str(first)

    def _meet(self, purpose: str, judge: Judge, times: int, words: dict[str, str]) -> str:
        with self._lock:
            patience = times * timeout()  # if this line raises, `fail` reports the error at this meeting
            folder = self._next()
            try:
                self.store.key_value_set(f"{folder}/said/{self._own}", self._words(**words))
                if self.leads:
                    verdict = self._lead(folder, purpose, judge, patience)
                else:
                    verdict = self._follow(folder, purpose, patience)
            except jax.errors.JaxRuntimeError as error:
                raise HostsDisagreeError(
                    f"cannot ask the other processes whether they {purpose}, too: {one_line(error)}; check that the "
                    "process with JAX's coordinator, usually process 0, still runs"
                ) from None
        if "stopped" in verdict:
            raise HostsDisagreeError(verdict["stopped"])
        if "left" in verdict:
            raise LeftAloneError(verdict["left"])
        self._met.add(purpose)
        return verdict["result"]

    def fail(self, why: str) -> None:
        """Reports at the next meeting that this process failed. This method does not wait, and raises no error."""
        if not self._lock.acquire(timeout=_LONGEST_CALL):
            return  # another thread of this process is at a meeting
        folder = self._next()
        try:
            if self.leads:
                self._announce(folder, stopped=self._failure(why))
            else:
                self.store.key_value_set(f"{folder}/said/{self._own}", self._words(failed=why))
        except jax.errors.JaxRuntimeError as error:
            logging.warning("dhelix: cannot tell the other processes that this one failed: %s", error)
        finally:
            self._lock.release()

    def introduce(self) -> None:
        """Tells the other processes this process's host name. They show it if this process does not come."""
        try:
            self.store.key_value_set(f"{self._folder}/host/{self._own}", self._hosts[self._own], allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            logging.vlog(1, "cannot tell the other processes this host's name: %s", error)

    def _next(self) -> str:
        self._number += 1
        return f"{self._folder}/{self._number}"

    def _words(self, **said: str) -> str:
        return json.dumps({"host": self._hosts[self._own], **said})

    def _failure(self, why: str) -> str:
        """The message that the other processes receive."""
        return _failed(Said(self._own, self._hosts[self._own], "", "", why))

    def _announce(self, folder: str, **verdict: str) -> dict[str, str]:
        self.store.key_value_set(f"{folder}/verdict", json.dumps(verdict))
        return verdict

    def _lead(self, folder: str, purpose: str, judge: Judge, patience: float) -> dict[str, str]:
        try:
            said = self._gather(folder, purpose, patience)
            left = next((f"{one.speaker}: {one.leaves}" for one in said if one.leaves), "")
            verdict = {"left": left} if left else {"result": judge(said)}
        except HostsDisagreeError as error:
            return self._announce(folder, stopped=str(error))
        except BaseException as error:
            self._announce(folder, stopped=self._failure(one_line(error)))
            raise
        self._announce(folder, **verdict)
        for number in range(self._first_kept, self._number):  # all processes are here, so they have read these verdicts
            self.store.key_value_delete(f"{self._folder}/{number}/")
        self._first_kept = self._number
        return verdict

    def _gather(self, folder: str, purpose: str, patience: float) -> list[Said]:
        """Collects all texts. Raises HostsDisagreeError as soon as a process failed or came for another purpose."""
        waiting = _Waiting(patience)
        sleep = _SHORTEST_SLEEP
        while True:
            said = self._heard(folder)
            self._hosts |= {one.process: one.host for one in said}
            if failed := [one for one in said if one.failed]:
                raise HostsDisagreeError(_failed(failed[0]))
            _check_purposes([one for one in said if not one.leaves])
            if len(said) == len(self.processes):
                return said
            if waiting.over() or waiting.is_long():
                present = {one.process for one in said}
                missing = self._named([p for p in self.processes if p not in present])
                if waiting.over():
                    _stop_waiting(missing, purpose, patience)
                waiting.report(missing, purpose)
                self.store.key_value_set(f"{folder}/missing", missing, allow_overwrite=True)
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)

    def _heard(self, folder: str) -> list[Said]:
        found = []
        for key, value in self.store.key_value_dir_get(f"{folder}/said/"):
            words = json.loads(value)
            one = (words.get(name, "") for name in Said._fields[1:])
            found.append(Said(int(key.rpartition("/")[2]), *one))
        return sorted(found)

    def _follow(self, folder: str, purpose: str, patience: float) -> dict[str, str]:
        """Waits for the verdict of the first process. Only that process reads all texts, so there are few calls."""
        waiting = _Waiting(patience)
        while True:
            try:
                return json.loads(self.store.blocking_key_value_get(f"{folder}/verdict", waiting.milliseconds()))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if waiting.over() or waiting.is_long():
                missing = self._missing(folder)
                if waiting.over():
                    _stop_waiting(missing, purpose, patience)
                waiting.report(missing, purpose)

    def _missing(self, folder: str) -> str:
        """The processes that the first process waits for, or the first process itself if it has not come."""
        first = self.processes[0]
        if self._try(f"{folder}/said/{first}") is None:
            return self._named([first])
        return self._try(f"{folder}/missing") or "another process"

    def _named(self, processes: Sequence[int]) -> str:
        for process in processes[:_NAMED]:
            if process not in self._hosts and (host := self._try(f"{self._folder}/host/{process}")):
                self._hosts[process] = host
        return names_of([(process, self._hosts.get(process, "")) for process in processes])

    def _try(self, key: str) -> str | None:
        try:
            return self.store.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None


_jobs: dict[tuple[int, ...], Job] = {}


def of(processes: Iterable[int]) -> Job | None:
    """The job of these processes. None if there is only one, or if this process is not among them or cannot join."""
    numbers = tuple(sorted(set(processes)))
    if len(numbers) < 2:
        return None
    client, own = jax_compat.coordination_client(), jax_compat.process_number()
    if client is None:
        if jax.process_count() > 1:
            line = (
                "processes cannot compare what they run, because jax.distributed.initialize() was not called: call it "
                "first"
            )
            say_once(line, (line,))
        return None
    if own not in numbers:
        return None
    if numbers not in _jobs or _jobs[numbers].store is not client:
        _jobs[numbers] = Job(client, numbers, own)
    return _jobs[numbers]


def everyone() -> Job | None:
    """The job of all processes. The function does not initialize JAX's backends."""
    return None if jax_compat.coordination_client() is None else of(range(jax_compat.process_total()))


def known() -> list[Job]:
    """The jobs that this process has been part of so far."""
    client = jax_compat.coordination_client()
    return [job for job in _jobs.values() if job.store is client]


def timeout() -> float:
    """Seconds to wait for others, from DHELIX_AGREEMENT_TIMEOUT. Raises DhelixError if its value is no time above 0."""
    value = os.environ.get(TIMEOUT, "").strip()
    try:
        seconds = float(value) if value else DEFAULT_TIMEOUT
        if seconds > 0:
            return seconds
    except ValueError:
        pass
    raise DhelixError(f"{TIMEOUT}={value!r}: give a number of seconds above 0 to wait for other processes")


def one_line(error: BaseException) -> str:
    """The type and text of an error in one line, shortened for the logs of other processes."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]} ..."


def name_of(process: int, host: str) -> str:
    return f"process {process} ({host})" if host else f"process {process}"


def names_of(processes: Sequence[tuple[int, str]]) -> str:
    """A text with the numbers and hosts of the first few processes, and with the number of the others."""
    named = ", ".join(name_of(*one) for one in processes[:_NAMED])
    return named if len(processes) <= _NAMED else f"{named} and {len(processes) - _NAMED} more"


class _Waiting:
    """Measures how long a process waits, and when to report it."""

    def __init__(self, patience: float) -> None:
        self._begin = time.monotonic()
        self._patience = patience
        self._next_report = _FIRST_REPORT

    def over(self) -> bool:
        return time.monotonic() - self._begin >= self._patience

    def is_long(self) -> bool:
        return time.monotonic() - self._begin >= self._next_report

    def milliseconds(self) -> int:
        """Time until the next report or the deadline, but at most _LONGEST_CALL, so that users can interrupt."""
        end = self._begin + min(self._next_report, self._patience)
        return max(1, int(1000 * min(_LONGEST_CALL, end - time.monotonic())))

    def report(self, missing: str, purpose: str) -> None:
        seconds = time.monotonic() - self._begin
        logging.warning(
            "dhelix: waiting for %s to %s, for %.0f s so far and %.0f s at most",
            missing,
            purpose,
            seconds,
            self._patience,
        )
        self._next_report = 3 * seconds


def _check_purposes(said: Sequence[Said]) -> None:
    purposes: dict[str, list[tuple[int, str]]] = {}
    for one in said:
        purposes.setdefault(one.purpose, []).append((one.process, one.host))
    if len(purposes) > 1:
        listed = "; ".join(
            f"{names_of(members)} {'is' if len(members) == 1 else 'are'} about to {purpose}"
            for purpose, members in purposes.items()
        )
        raise HostsDisagreeError(
            f"hosts disagree on what comes next: {listed}. They would deadlock. Call the same decorated steps in the "
            "same order on every host"
        )


def _failed(said: Said) -> str:
    return f"{said.speaker} stopped before all processes ran the step: {said.failed}"


def _stop_waiting(missing: str, purpose: str, patience: float) -> NoReturn:
    raise HostsDisagreeError(
        f"{missing} did not come to {purpose} within {patience:g} s. All processes must run the step with dhelix: "
        f"check the log there. {TIMEOUT}=SECONDS waits longer"
    )
