"""XLA's text parser in a process of its own, so that no text can hurt this one.

    PARSER.parse("HloModule jit_step [...]")    # bytes of an HloModuleProto

On some malformed texts XLA's parser aborts its process, needs all memory, or takes minutes. So a child process parses.
Its memory is limited, and its time, too. It is started for the first text and parses all later ones. It is started
again after it ended.

The parent writes whether a text or a proto follows, its length, and the text or proto. The child answers with a status,
a length, and the bytes of the module or XLA's error. If the child ends instead, its error output says why.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat

GIB = 2**30
_MEMORY_PER_BYTE = 100  # a module takes some 20 bytes for each byte of text; the limit is a number of GiB
_SECONDS, _SECONDS_PER_BYTE = 60.0, 2e-6  # XLA reads some 10 MB per second
_REQUEST = struct.Struct("<BQ")  # whether a proto follows, and its length
_ANSWER = struct.Struct("<BQ")  # status, and length
_CHUNK = 2**16
_REASON = re.compile(r"RET_CHECK failure \(\S+\) (.*)|Check failed: (.*)")


class ParserStopped(DhelixError):
    """XLA's parser ended its process, or took too long. The message is the reason that XLA printed, or else the end."""


class ParserProcess:
    """A process that parses HLO text. It may be used by several threads, which then take turns."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._memory = 0
        self._turn = threading.Lock()

    def parse(self, text: str) -> bytes:
        """A serialized HloModuleProto of the text.

        Raises:
          DhelixError: the text does not parse; holds XLA's full message.
          ParserStopped: XLA's parser aborted its process, needed too much memory, or took too long.
        """
        return self._answer(jax_compat.readable(text).encode(errors="replace"), is_proto=False)

    def doubt(self, module: bytes) -> str:
        """Why XLA takes a serialized HloModuleProto for invalid; "" if XLA reads, prints and parses it."""
        try:
            self._answer(module, is_proto=True)
        except DhelixError as error:
            return " ".join(str(error).split())[:300] or "it rejects the module"
        return ""

    def _answer(self, source: bytes, is_proto: bool) -> bytes:
        with self._turn:
            process = self._started(GIB * (1 + _MEMORY_PER_BYTE * len(source) // GIB))
            seconds = _SECONDS + _SECONDS_PER_BYTE * len(source)
            try:
                status, answer = _exchange(
                    process, _REQUEST.pack(is_proto, len(source)) + source, time.monotonic() + seconds
                )
            except TimeoutError:
                self.stop()
                raise ParserStopped(f"it takes more than {seconds:.0f} s") from None
            except (EOFError, BrokenPipeError):
                raise ParserStopped(self._why_ended(process)) from None
        if status:
            raise DhelixError(answer.decode(errors="replace"))
        return answer

    def stop(self) -> None:
        """Ends the process. The next text starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def _started(self, memory: int) -> subprocess.Popen[bytes]:
        """The running process, which may use this many bytes of memory."""
        if self._process is not None and (self._process.poll() is not None or memory > self._memory):
            self.stop()
        if self._process is None:
            self._memory, self._errors = memory, tempfile.TemporaryFile()  # noqa: SIM115 (the process writes it)
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", jax_compat.TEXT_PARSER, str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": paths},
            )
        return self._process

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        assert self._errors is not None
        code = process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")
        self.stop()
        if "bad_alloc" in said or "MemoryError" in said:
            return f"it needs more than {self._memory / GIB:.1f} GiB of memory"
        found = _REASON.search(said)
        if found:
            return next(filter(None, found.groups()), "").strip()
        return signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit status {code}"


PARSER = ParserProcess()
"""The process that parses all texts of this process."""


def _exchange(process: subprocess.Popen[bytes], request: bytes, until: float) -> tuple[int, bytes]:
    """Sends the request and receives the status and the answer.

    Raises:
      EOFError, BrokenPipeError: the process ended.
      TimeoutError: the answer did not come in time.
    """
    assert process.stdin is not None and process.stdout is not None
    to, back = process.stdin.fileno(), process.stdout.fileno()
    unsent = memoryview(request)
    while unsent:
        _wait([], [to], until)
        unsent = unsent[os.write(to, unsent[:_CHUNK]) :]
    status, length = _ANSWER.unpack(_receive(back, _ANSWER.size, until))
    return status, _receive(back, length, until)


def _receive(back: int, length: int, until: float) -> bytes:
    parts, missing = [], length
    while missing:
        _wait([back], [], until)
        parts.append(os.read(back, missing))
        if not parts[-1]:
            raise EOFError
        missing -= len(parts[-1])
    return b"".join(parts)


def _wait(to_read: list[int], to_write: list[int], until: float) -> None:
    if not any(select.select(to_read, to_write, [], max(until - time.monotonic(), 0.0))):
        raise TimeoutError


atexit.register(PARSER.stop)
