"""The constants of a cluster that a user may set: their names in files and flags, their units and their usual origins.

    CONSTANTS["between_gb_per_second"].checked(45, "--constants")     # 45e9, the value of `Hardware.inter_bandwidth`

Each one sets a field of `Hardware`. The unit is part of the name, so that a file needs no other place to say it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dhelix.errors import DhelixError
from dhelix.profiles.hardware import Hardware


class ClusterError(DhelixError):
    """A description of a cluster makes no sense."""


@dataclass(frozen=True)
class Constant:
    """One constant.

    Attributes:
      field: the field of `Hardware` that it sets.
      unit: size of the unit of a file's value, in the unit of `field`.
      least, most: values of a file outside of this range are refused, because they are probably in another unit.
      words: what it is, for help and errors.
      usual: where the values of `profiles/hardware.py` come from.
    """

    field: str
    unit: float
    least: float
    most: float
    words: str
    usual: str

    def of(self, hardware: Hardware) -> float:
        """The value that `hardware` has, in the unit of files."""
        return float(getattr(hardware, self.field)) / self.unit

    def checked(self, name: str, value: Any, where: str) -> float:
        """`value` in the unit of `field`.

        Args:
          name: the constant's name.
          where: the file or flag with the value, for the error.

        Raises:
          ClusterError: the value is no number, or outside of the range.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ClusterError(f"{where}: {name} is {value!r}; give a number, {self.words}")
        if not self.least <= value <= self.most:
            raise ClusterError(
                f"{where}: {name} is {value:g}, but {self.words} is between {self.least:g} and {self.most:g}; "
                f"check the unit{' (400 Gb/s are 50 GB/s)' if name.endswith('gb_per_second') else ''}"
            )
        return self.unit * value


_SHEET = "NVIDIA's data sheet"
_FITTED = "fitted to Llama-8B steps on H200s; scaled or guessed for other GPUs (profiles/hardware.py)"
_GUESS = "a guess"
_RATES = "fitted to measured pairs on H100s and H200s; a guess for other GPUs"

CONSTANTS: dict[str, Constant] = {
    "peak_tflops": Constant("peak_flops", 1e12, 1, 20_000, "dense bf16 TFLOP/s of a GPU", _SHEET),
    "memory_gb": Constant("memory_bytes", 1e9, 4, 2_000, "GB of memory of a GPU", _SHEET),
    "memory_gb_per_second": Constant("memory_bandwidth", 1e9, 50, 50_000, "GB/s of a GPU's memory", _SHEET),
    "sms": Constant("sms", 1, 8, 1_000, "number of streaming multiprocessors", _SHEET),
    "host_gb_per_second": Constant("host_bandwidth", 1e9, 1, 1_000, "GB/s between GPU and host", _GUESS),
    "gemm_efficiency": Constant(
        "gemm_efficiency", 1, 0.05, 1, "the fraction of the peak that matrix products reach", _FITTED
    ),
    "attention_efficiency": Constant(
        "attention_efficiency", 1, 0.05, 1, "the fraction of the peak that attention reaches", _FITTED
    ),
    "memory_efficiency": Constant(
        "memory_efficiency", 1, 0.05, 1, "the fraction of the memory bandwidth that kernels reach", _FITTED
    ),
    "kernel_us": Constant("kernel_seconds", 1e-6, 0, 100, "µs that each kernel takes beside its work", _FITTED),
    "inside_gb_per_second": Constant(
        "intra_bandwidth", 1e9, 0.5, 2_000, "GB/s of a GPU that collectives reach inside a node (bus bandwidth)", _GUESS
    ),
    "inside_us": Constant("intra_latency", 1e-6, 0, 1_000, "µs until a collective inside a node starts", _GUESS),
    "between_gb_per_second": Constant(
        "inter_bandwidth", 1e9, 0.01, 250, "GB/s of a GPU that collectives reach between nodes (bus bandwidth)", _GUESS
    ),
    "between_us": Constant("inter_latency", 1e-6, 0, 10_000, "µs until a collective between nodes starts", _GUESS),
    "compute_rate": Constant(
        "compute_rate", 1, 0.01, 1, "the speed of compute beside a collective inside a node", _RATES
    ),
    "communication_rate": Constant(
        "communication_rate", 1, 0.01, 1, "the speed of a collective inside a node beside compute", _RATES
    ),
    "compute_rate_between": Constant(
        "inter_compute_rate", 1, 0.01, 1, "the speed of compute beside a collective between nodes", _RATES
    ),
    "communication_rate_between": Constant(
        "inter_communication_rate", 1, 0.01, 1, "the speed of a collective between nodes beside compute", _RATES
    ),
}  # fmt: skip
"""By name. Bandwidths are in one direction."""


def constant(name: str, where: str) -> Constant:
    """The constant called `name`. Raises ClusterError if there is none."""
    if name not in CONSTANTS:
        raise ClusterError(f"{where}: there is no constant {name!r}; use one of {', '.join(CONSTANTS)}")
    return CONSTANTS[name]
