"""Keeps lines of libraries away from stdout. Gloo, which connects CPU devices, says there which processes it found."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def to_stderr() -> Iterator[int | None]:
    """Within the context, all that is printed to stdout goes to stderr, also by libraries in C++.

    Yields:
      A file descriptor of the true stdout; None if stdout or stderr is no file, as in a notebook. Then nothing changes.
    """
    try:
        out, error = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        yield None
        return
    sys.stdout.flush()
    kept = os.dup(out)
    os.dup2(error, out)
    try:
        yield kept
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what a library has printed, but not written yet
        os.dup2(kept, out)
        os.close(kept)
