"""Records a GPU's clock and power while steps run. A GPU slows down at its power limit, and overlap draws more power.

    with Clocks() as clocks:
        start = time.perf_counter()
        step()
        state = clocks.between(start, time.perf_counter())     # State(mhz=1755.0, watts=688.0), None without samples

`nvidia-smi` runs as a separate process and samples GPU 0 every 50 ms. Without `nvidia-smi`, nothing is recorded.
`joules()` reads the energy counter of GPU 0, which the driver renews some ten times a second.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass

_QUERY = (
    "nvidia-smi", "--id=0", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits",
    "--loop-ms=50",
)  # fmt: skip


@dataclass(frozen=True)
class State:
    """Medians over a period: the SMs' clock and the GPU's power."""

    mhz: float
    watts: float


class Clocks:
    """A context manager that records samples of the clock and power of GPU 0."""

    def __init__(self, command: tuple[str, ...] = _QUERY) -> None:
        self._command = command
        self._samples: list[tuple[float, State]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        if shutil.which(self._command[0]):
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter()
            try:
                mhz, watts = map(float, line.split(","))
            except ValueError:  # [N/A] or an error message
                continue
            self._samples.append((now, State(mhz, watts)))

    def between(self, start: float, end: float) -> State | None:
        """Medians from `start` to `end`, in seconds of `time.perf_counter`; None without samples in this time."""
        found = [state for at, state in list(self._samples) if start <= at <= end]
        if not found:
            return None
        return State(statistics.median(s.mhz for s in found), statistics.median(s.watts for s in found))


def joules() -> float | None:
    """The energy that GPU 0 has taken since its driver was loaded; None without NVIDIA's management library."""
    found = _management()
    if found is None:
        return None
    library, gpu = found
    millijoules = ctypes.c_ulonglong()
    failed = library.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(millijoules))
    return None if failed else millijoules.value / 1e3


@functools.cache
def _management() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """NVIDIA's management library, and its handle of GPU 0."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    gpu = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu)):
        return None
    return library, gpu
