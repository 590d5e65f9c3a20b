"""Processes that measure: what they say, silence, and their end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dhelix.launch.profile.workers import SilentError, Worker


def worker(code: str, tmp_path: Path) -> Worker:
    return Worker([sys.executable, "-c", code], os.environ, tmp_path / "stderr.txt")


def test_a_process_ends_when_who_started_it_was_killed(tmp_path: Path) -> None:
    code = "from dhelix.launch.profile.workers import end_with_stdin; end_with_stdin(); print('{}'); "
    started = worker(code + "import sys, time; sys.stdout.flush(); time.sleep(60)", tmp_path)
    assert next(started.messages()) == {}
    assert started.process.poll() is None and started.process.stdin is not None
    started.process.stdin.close()
    assert started.process.wait(30) == 1
    started.end()


def test_a_silent_process_is_noticed(tmp_path: Path) -> None:
    started = worker(
        "import time; print('{\"n\": 1}', flush=True); print('a library', flush=True); time.sleep(60)", tmp_path
    )
    messages = started.messages()
    assert next(messages) == {"n": 1}
    started.patience = 2.0
    with pytest.raises(SilentError, match="no answer for 2 s"):
        next(messages)
    started.end()
    assert started.process.poll() is not None


def test_of_a_failed_check_the_check_is_told_and_not_its_stack(tmp_path: Path) -> None:
    words = "I1124 fine\nF1124 20:52:40.1 7 cache.cc:1] Check failed: it is full\n    @ 0x7f4ef1129ecc (unknown)\n"
    started = worker(f"import sys; sys.stderr.write({words!r})", tmp_path)
    assert not list(started.messages())
    assert started.last_words().endswith("Check failed: it is full")
