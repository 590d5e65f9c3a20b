"""Starts workers and reads their messages. A worker is a process that measures.

    finished = measure(Request("connections1", out="h200-nvlink.json", preset={...}), on_progress=bar)

The environment variables and XLA flags of a launch setting hold for a whole process. So each setting has its own worker
(`dhelix.launch.profile.worker`), and this process does not change its own environment. If a worker is stopped or dies,
the file keeps its results. If this process dies, its workers end themselves, so that the GPUs become free. The link
`two-nodes` needs two workers, which NCCL treats as two nodes (`dhelix.runtime.processes.nodes`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from dhelix.errors import DhelixError
from dhelix.launch.profile.worker import Request
from dhelix.profiles.profile import SETTINGS
from dhelix.runtime.compiler import autotune_results
from dhelix.runtime.processes.nodes import emulated_nodes

COMMAND = (sys.executable, "-m", "dhelix.launch.profile.worker")
_LINKS: Mapping[str, Mapping[str, str]] = {"nvlink": {}, "no-p2p": {"NCCL_P2P_DISABLE": "1"}, "two-nodes": {}}
_PATIENCE = 10  # seconds that a worker gets to end itself before it is killed


def gpus_here() -> tuple[str, int]:
    """The kind of this machine's GPUs (empty if nvidia-smi does not say), and the number of visible GPUs.

    The answer comes from the driver. JAX is not asked, because it would reserve the GPUs for this process.
    """
    kinds = _nvidia_smi()
    count = len(kinds) or sum(1 for p in Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = min(count, len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))
    return kinds[0] if kinds else "", count


def measure(request: Request, on_progress: Callable[[int, int, str], bool], gpus: int | None = None) -> bool:
    """Runs a request in one or two workers, until it is done.

    Args:
      on_progress: called with the number of finished measurements, their total, and what comes next. If it returns
        False, the request stops.
      gpus: number of the machine's GPUs to use; None: all.

    Returns:
      True if the request finished, and False if `on_progress` stopped it.

    Raises:
      DhelixError: the worker reported an error, or it died. If it died, the message quotes a line of its stderr.
    """
    with tempfile.TemporaryDirectory(prefix="dhelix-profile-") as folder:
        processes: list[subprocess.Popen[str]] = []
        try:
            for number, (part, environment) in enumerate(_parts(request, gpus)):
                path = Path(folder, f"request{number}.json")
                path.write_text(part.to_json())
                with Path(folder, f"stderr{number}.txt").open("w") as errors:
                    processes.append(_start([*COMMAND, str(path)], environment, errors))
            for message in _messages(processes[0]):
                if "error" in message:
                    raise DhelixError(f"setting {request.setting}: {message['error']}")
                if message.get("finished"):
                    _wait(processes)
                    return True
                if "done" in message and not on_progress(message["done"], message["total"], message["what"]):
                    return False
            status = processes[0].wait()
            words = _last_words(Path(folder, "stderr0.txt"))
            raise DhelixError(
                f"the process that measures setting {request.setting} ended with status {status} ({words}); "
                f"{request.out} holds what it measured, and the same command continues from there"
            )
        finally:
            for process in processes:
                _end(process)


def _parts(request: Request, gpus: int | None) -> Iterator[tuple[Request, dict[str, str]]]:
    """The request and the environment of each worker."""
    setting = SETTINGS[request.setting]
    environment = {**os.environ, **setting.environment, **_LINKS[request.link]}
    flags = [os.environ.get("XLA_FLAGS", ""), *setting.xla_flags, *_autotuning(Path(request.out))]
    environment["XLA_FLAGS"] = " ".join(flags).strip()
    count = gpus_here()[1]
    if gpus is not None and gpus < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:gpus])
    if request.link != "two-nodes":
        yield request, environment
        return
    for node in emulated_nodes(2, (gpus or count) // 2, _free_port()):
        place: dict[str, Any] = {
            "coordinator": node.coordinator,
            "processes": node.processes,
            "process": node.process,
            "local_device_ids": list(node.local_device_ids),
        }
        yield replace(request, node=place), {**environment, **node.environment}


def _autotuning(profile: Path) -> list[str]:
    """XLA flags that store the autotuner's choices next to the profile, and load them if they exist.

    Without these flags, the autotuner could choose other kernels in each run. Other kernels have other keys in the
    profile.
    """
    file = profile.with_suffix(".autotune.pbtxt")
    known = file if file.is_file() and file.stat().st_size else autotune_results.file()
    load = [f"--xla_gpu_load_autotune_results_from={known}"] if known else []
    return [f"--xla_gpu_dump_autotune_results_to={file}", *load]


def _start(command: list[str], environment: Mapping[str, str], errors: IO[str]) -> subprocess.Popen[str]:
    """Starts a worker in a session of its own.

    Ctrl-C then interrupts only this process, which ends the worker properly. If this process is killed, the worker's
    stdin ends, and the worker ends itself.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=dict(environment), stdin=pipe, stdout=pipe, stderr=errors, text=True, start_new_session=True
    )


def _messages(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects on the worker's stdout, one per line. Other lines, which libraries may print, are skipped."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            yield message


def _wait(processes: list[subprocess.Popen[str]]) -> None:
    """Waits until the workers have ended by themselves, but at most _PATIENCE seconds."""
    deadline = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _last_words(path: Path) -> str:
    """The line of a worker's stderr that tells most: the last fatal log line, or else the last line with words.

    A fatal log line comes from a failed check in C++. The stack trace after it is left out.
    """
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if re.search(r"\w", line)]
    telling = [line for line in lines if re.match(r"F\d{4} ", line)] or lines
    return telling[-1][:300] if lines else "it said nothing"


def _nvidia_smi() -> list[str]:
    """Names of the GPUs, according to nvidia-smi; empty if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return [line.strip() for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
