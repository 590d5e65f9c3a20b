"""Waits for the processes of a job that run below us. If one fails, ends the others and says which one and why.

    dhelix launch: process 2 (pid 4711) was ended by SIGKILL; the 3 other processes were stopped

A program that fails by itself has said so. If its output is on the screen, nothing is added to it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from dhelix.launch.hosts import orphans
from dhelix.launch.hosts.children import Child

_POLL = 0.05  # seconds
_SETTLING = 0.2  # seconds in which a process that dies makes others fail
_ALIKE = 2.0  # seconds that process 0 gets to fail by itself
_UNJOINED = 5.0  # the same, if the first one failed before it joined: then a script fails alike in all
_LEAVING = 10.0  # seconds that a process gets to end after it said that it failed
_TERMINATING = 3.0  # seconds between SIGTERM and SIGKILL
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)

_GONE = "it was killed, or its host is down; look at its log"
_UNHEARD = re.compile(r"Task (\d+) heartbeat timeout|tasks? (?:is|are) unhealthy[^\n]*\n\s*(\d+)")
_UNJOINED_JOB = re.compile(r"DEADLINE_EXCEEDED[^\n]*\s+RPC: \S*/RegisterTask")
_COORDINATOR = re.compile(r"Failed to send RPC to coordination service|leader task was preempted")


class Watch:
    """Watches processes of one job.

    Args:
      children: the processes, in the order of their numbers. They may be started later.
      total: number of processes in the job.
      heartbeat: seconds after which JAX misses a process.

    Attributes:
      names_files: whether a message says where the output is that was not shown.
    """

    def __init__(self, children: Sequence[Child], total: int, heartbeat: int) -> None:
        self._children, self._total, self._heartbeat = children, total, heartbeat
        self._received: list[int] = []
        self.names_files = False
        orphans.adopt()
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as below nohup; the processes inherit that
                signal.signal(number, self._receive)

    def run(self) -> int:
        """Waits until all have ended. Returns the exit status: that of the first process that failed."""
        first = self._first_failure()
        if first is None:
            self._close()
            return 0
        if not self._received:
            self._wait([first], _LEAVING)
            if (first.code() or 0) > 0:  # it may have failed as process 0 will, which is on the screen
                self._wait(self._children[:1], _ALIKE if "joined" in first.said else _UNJOINED)
        self._stop([child for child in self._children if child.code() is None])
        orphans.end()
        self._close()
        words = "" if self._received else self._words(first)
        self.names_files = bool(words or self._received)
        where = self._where() if self._received or (words and first.output.file is None) else ""
        for line in filter(None, (words, where)):
            print(line, file=sys.stderr, flush=True)
        return _status(first)

    def _first_failure(self) -> Child | None:
        """Waits for a failure. Of several at once, the first is one that no other process caused."""
        while True:
            ended = all(child.code() is not None for child in self._children)
            if any(child.failing() for child in self._children):
                time.sleep(_SETTLING)
                failing = [child for child in self._children if child.failing()]
                return next((child for child in failing if not self._reason(child)), failing[0])
            if ended:
                return None
            time.sleep(_POLL)

    def _wait(self, children: Sequence[Child], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(child.code() is None for child in children):
            time.sleep(_POLL)

    def _stop(self, children: Sequence[Child]) -> None:
        """Ends processes. JAX catches SIGTERM as a notice of preemption, so SIGKILL follows."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in children:
                child.send(number)
            self._wait(children, _TERMINATING)

    def _close(self) -> None:
        for child in self._children:
            child.output.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on. Ctrl-C on a terminal reaches the processes without us, because they share our group.

        A second signal that ends processes is SIGKILL, because JAX takes SIGTERM as a notice and goes on.
        """
        again = number in self._received
        self._received += [number] if number in _ENDING else []
        for child in self._children:
            if again or number != signal.SIGINT or not _in_foreground():
                child.send(signal.SIGKILL if again else number)

    def _words(self, first: Child) -> str:
        """The message, or "" if the program has said it itself."""
        how, reason = _how(first), self._reason(first)
        by_signal = (first.code() or 0) < 0
        screen = self._children[0]
        if not reason and not by_signal:
            own = first.output.last_lines()[-1:]
            if first.output.file is None or (screen.output.file is None and own and own[0] in screen.output.text()):
                return ""
        lines = [f"dhelix launch: process {first.number} (pid {first.pid}) {how}"]
        if others := len(self._children) - 1:
            lines[0] += f"; the {others} other processes were stopped" if others > 1 else "; the other was stopped"
        if reason:
            lines[0] = f"dhelix launch: {reason}; process {first.number} of {self._total} {how} because of it"
        if first.output.file is not None and reason:
            lines[0] += f"; its output is in {first.output.file}"
        elif first.output.file is not None:
            lines += [f"the end of {first.output.file}:", *(f"  {line}" for line in first.output.last_lines())]
        return "\n".join(lines)

    def _where(self) -> str:
        """Says where the output is that was not shown; "" if all was."""
        hidden = [child for child in self._children if child.output.file is not None]
        if not hidden:
            return ""
        whose, file = f"process {hidden[0].number}", hidden[0].output.file
        if file is not None and len(self._children) > 1:
            whose, file = "the other processes", file.parent
        return f"dhelix launch: the output of {whose} is in {file}"

    def _reason(self, child: Child) -> str:
        """Which other process, of those that are not ours to see, made this one fail; "" if none did."""
        if child.said.get("because"):
            return child.said["because"]
        text = child.output.text()
        hosts = child.said.get("hosts", {})
        if found := _UNHEARD.search(text):
            number = next(filter(None, found.groups()))
            return f"{_named(number, hosts)} gave no sign of life for {self._heartbeat} s; {_GONE}"
        if _UNJOINED_JOB.search(text):
            return (
                f"not all {self._total} processes joined the job in time: one was not started, or ended before it "
                "joined, or does not reach process 0; look at their logs"
            )
        if _COORDINATOR.search(text) and child.number != 0:
            return f"{_named('0', hosts)}, which runs JAX's coordinator, does not answer; {_GONE}"
        return ""


def _in_foreground() -> bool:
    """Whether Ctrl-C on our terminal reaches this process and those that share its group."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False


def _named(number: str, hosts: dict[str, str]) -> str:
    return f"process {number} ({hosts[number]})" if number in hosts else f"process {number}"


def _how(child: Child) -> str:
    code = child.code() or 0
    if code >= 0:
        return f"ended with exit status {_status(child)}"
    hint = ", perhaps because the host ran out of memory" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _status(child: Child) -> int:
    """Its exit status as a shell says it."""
    code = child.code() or 0
    return 128 - code if code < 0 else code
