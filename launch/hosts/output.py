"""Where the output of a process goes, and its last lines, which say why a process ended.

shown       stdout is ours; stderr passes through us unchanged, over a terminal of its own if ours is one
prefixed    both pass through us, and each line begins with the number of the process: "[3] step 7 ..."
file        both go to a file
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import termios
import threading
import tty
from pathlib import Path
from typing import IO

_KEPT = 16384  # bytes of the end of an output
_SHOWN = 20  # lines of it in a message
_NOISE = re.compile(r"^(\*\*\* Check failure stack trace|\s+@\s+0x|=== Source Location Trace|external/xla)|^\s*$")
"""Lines that XLA prints when it ends a process, which say nothing about why."""
_lock = threading.Lock()


class Output:
    """The output of one process. Start the process with `stdout` and `stderr`, then call `started`."""

    def __init__(self) -> None:
        self.stdout: int | None = None
        self.stderr: int | None = None
        self.file: Path | None = None
        self._end = b""
        self._threads: list[threading.Thread] = []
        self._given: list[int] = []

    @classmethod
    def shown(cls) -> Output:
        made = cls()
        on_terminal = sys.stderr.isatty()
        ours, made.stderr = pty.openpty() if on_terminal else os.pipe()
        if on_terminal:
            tty.setraw(made.stderr)  # so that lines end as they were written
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetwinsize(made.stderr, termios.tcgetwinsize(sys.stderr.fileno()))
        made._given.append(made.stderr)
        made._copy(ours, sys.stderr, b"")
        return made

    @classmethod
    def prefixed(cls, prefix: str) -> Output:
        made = cls()
        out, made.stdout = os.pipe()
        err, made.stderr = os.pipe()
        made._given += [made.stdout, made.stderr]
        made._copy(out, sys.stdout, prefix.encode())
        made._copy(err, sys.stderr, prefix.encode())
        return made

    @classmethod
    def to_file(cls, file: Path) -> Output:
        made = cls()
        made.file = file
        made.stdout = made.stderr = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        made._given.append(made.stdout)
        return made

    def started(self) -> None:
        """Closes our copies of what the process writes to, so that reading ends when the process does."""
        for descriptor in self._given:
            os.close(descriptor)

    def close(self) -> None:
        """Waits until what the ended process wrote has been copied."""
        for thread in self._threads:
            thread.join(timeout=2)  # a child of the process may keep its output open

    def text(self) -> str:
        """The end of what the process wrote; of a shown process, the end of its stderr."""
        if self.file is None:
            return self._end.decode(errors="replace")
        with open(self.file, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _KEPT))
            return file.read().decode(errors="replace")

    def last_lines(self) -> list[str]:
        """The last lines that say something."""
        return [line.rstrip() for line in self.text().splitlines() if not _NOISE.match(line)][-_SHOWN:]

    def _copy(self, source: int, to: IO[str], prefix: bytes) -> None:
        thread = threading.Thread(target=self._run, args=(source, to, prefix), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, source: int, to: IO[str], prefix: bytes) -> None:
        rest = b""
        while True:
            try:
                read = os.read(source, 65536)
            except OSError:  # a terminal says so when its other side is closed
                read = b""
            self._end = (self._end + read)[-_KEPT:]
            lines = (rest + read).splitlines(keepends=True) if prefix else [read]
            rest = lines.pop() if prefix and read and lines and not lines[-1].endswith(b"\n") else b""
            _write(to, b"".join(prefix + line for line in lines))
            if not read:
                break
        os.close(source)


def _write(to: IO[str], text: bytes) -> None:
    with _lock, contextlib.suppress(OSError, ValueError):
        try:
            to.flush()
            to.buffer.write(text)  # pyright: ignore[reportAttributeAccessIssue]
            to.buffer.flush()  # pyright: ignore[reportAttributeAccessIssue]
        except BrokenPipeError:  # nobody reads it any more, as below `| head`; the rest goes nowhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, to.fileno())
            os.close(nowhere)
