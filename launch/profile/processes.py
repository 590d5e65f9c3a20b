"""Starts the processes that measure, and listens to them: one process per launch setting and link.

    finished = measure(Request("connections1", out="h200-nvlink.json", preset={...}), on_progress=bar)

Environment variables and XLA flags of a setting hold for a whole process, so each has its own
(`profile_worker`), and nothing is set in this one. A process that is stopped or dies leaves what it measured in the
file, and one whose parent is gone ends, so that nothing holds the GPUs. Two nodes are two processes that NCCL takes for
nodes (`runtime.profiling.nodes`).
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
_PATIENCE = 10  # seconds that a process has to end when it is told to


def gpus_here() -> tuple[str, int]:
    """Kind of this machine's GPUs (empty if nvidia-smi does not say) and how many a process sees of them.

    Asked of the driver, not of JAX: whoever asks JAX takes the GPUs.
    """
    kinds = _nvidia_smi()
    count = len(kinds) or sum(1 for p in Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = min(count, len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))
    return kinds[0] if kinds else "", count


def measure(request: Request, on_progress: Callable[[int, int, str], bool], gpus: int | None = None) -> bool:
    """Runs a request to its end; False if `on_progress` ended it.

    Args:
      on_progress: told how many measurements are done, of how many, and what comes next; False stops.
      gpus: how many of the machine's to use; None: all.

    Raises:
      DhelixError: what the process found wrong, or its last words if it died.
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
                f"the process that measures setting {request.setting} ended with status {status} ({words}); what it"
                f" measured is in {request.out}, and the same command goes on from there"
            )
        finally:
            for process in processes:
                _end(process)


def _parts(request: Request, gpus: int | None) -> Iterator[tuple[Request, dict[str, str]]]:
    """The request and the environment of each process."""
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
    """XLA flags that keep the choices of its autotuner beside the profile: chosen anew, kernels would have new keys."""
    file = profile.with_suffix(".autotune.pbtxt")
    known = file if file.is_file() and file.stat().st_size else autotune_results.file()
    load = [f"--xla_gpu_load_autotune_results_from={known}"] if known else []
    return [f"--xla_gpu_dump_autotune_results_to={file}", *load]


def _start(command: list[str], environment: Mapping[str, str], errors: IO[str]) -> subprocess.Popen[str]:
    """In a session of its own: an interrupt is for this process, which then ends the other in order. The other ends
    by itself when its stdin does, which is when this process was killed."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=dict(environment), stdin=pipe, stdout=pipe, stderr=errors, text=True, start_new_session=True
    )


def _messages(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """JSON objects of its stdout, a line each; libraries may print other lines between."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            yield message


def _wait(processes: list[subprocess.Popen[str]]) -> None:
    """Until they have ended by themselves, if that does not take long."""
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
    """The last line on stderr that says something; of a failed check, which prints a stack behind it, that line."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if re.search(r"\w", line)]
    telling = [line for line in lines if re.match(r"F\d{4} ", line)] or lines
    return telling[-1][:300] if lines else "it said nothing"


def _nvidia_smi() -> list[str]:
    """Names of the GPUs; empty where there is no driver."""
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
