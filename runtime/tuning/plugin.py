"""The NCCL tuner plugin of this process: built at first use, loaded by NCCL and by Python.

    plugin = install()            # before NCCL makes its first communicator
    plugin.load(table)            # while no collective runs, and on all processes at the same place of the program
    plugin.counts().matched       # how many of NCCL's questions were about collectives of the table

`nccl_tuner.c` says what a table is. NCCL loads the library that NCCL_TUNER_PLUGIN names. A library is loaded only once
into a process, so Python and NCCL share its table. Building takes the system's C compiler, and no sources of NCCL. The
library is kept in ~/.cache/dhelix/nccl_tuner, under a digest of the source.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from dhelix.errors import DhelixError

VARIABLE = "NCCL_TUNER_PLUGIN"
FUNCTIONS = ("collective-broadcast", "reduce", "all-gather", "reduce-scatter", "all-reduce")
"""Kinds of collectives by the number that NCCL gives them."""

_POLICY = "NCCL_CTA_POLICY"
_CHOSEN = ("NCCL_ALGO", "NCCL_PROTO")
"""With these, NCCL does not choose by its policy."""

_FOLDER = Path("~/.cache/dhelix/nccl_tuner")
_SOURCES = ("nccl_tuner.c", "tuner_abi.h")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")


class TunerError(DhelixError):
    """The plugin cannot be built or loaded, or it refuses a table."""


@dataclass(frozen=True)
class Counts:
    """What has happened since the process began, on all GPUs of the process.

    Attributes:
      communicators: communicators that NCCL made with the plugin. 0 means that NCCL does not use it.
      asked: questions of NCCL.
      matched: questions about collectives of the table.
      applied: questions that were answered with a setting.
      impossible: questions whose algorithm and protocol the communicator cannot run. NCCL chose others.
    """

    communicators: int
    asked: int
    matched: int
    applied: int
    impossible: int


@dataclass(frozen=True)
class Asked:
    """A question of NCCL.

    Attributes:
      communicator: its number, in the order in which NCCL made the communicators of this process, one for each GPU.
      ranks: number of GPUs of the communicator.
      kind: kind of the collective, such as "all-gather".
      bytes: the larger of what a rank sends and what it receives.
      matched: whether it was in the table.
    """

    communicator: int
    ranks: int
    kind: str
    bytes: int
    matched: bool


class _Question(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("communicator", "ranks", "bytes")),
        *((name, ctypes.c_int) for name in ("function", "matched")),
    )


class Plugin:
    """The loaded library. `install` makes the one that NCCL uses."""

    def __init__(self, path: Path) -> None:
        """Raises TunerError if the library cannot be loaded."""
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise TunerError(f"{path}: cannot be loaded ({error}); remove it, and it is built again") from None
        self._library.dhelix_tuner_record.argtypes = [ctypes.c_size_t]
        self._library.dhelix_tuner_recorded.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.dhelix_tuner_recorded.restype = ctypes.c_size_t
        self._library.dhelix_tuner_load.argtypes = [ctypes.c_char_p]

    def load(self, table: str) -> None:
        """Replaces the table. An empty one leaves everything to NCCL.

        No collective may run meanwhile, and all processes must load equal tables at the same place of the program.

        Raises:
          TunerError: the table is wrong. The one before stays.
        """
        if line := self._library.dhelix_tuner_load(table.encode()):
            raise TunerError(f"line {line} of the table cannot be read: {table.splitlines()[max(line, 1) - 1]!r}")

    def counts(self) -> Counts:
        found = (ctypes.c_ulonglong * 5)()
        self._library.dhelix_tuner_counts(found)
        return Counts(*found)

    def record(self, most: int) -> None:
        """From now on keeps the next `most` questions; 0 keeps none."""
        if self._library.dhelix_tuner_record(most):
            raise TunerError(f"no memory for {most} questions")

    def recorded(self) -> Sequence[Asked]:
        """The kept questions, in order."""
        room = self._library.dhelix_tuner_recorded(None, 0)
        found = (_Question * room)()
        count = min(self._library.dhelix_tuner_recorded(found, room), room)
        return [
            Asked(one.communicator, one.ranks, FUNCTIONS[one.function], one.bytes, bool(one.matched))
            for one in found[:count]
        ]


def install() -> Plugin:
    """Builds and loads the plugin, and tells NCCL to use it. Communicators that exist already do not use it.

    Raises:
      TunerError: there is no C compiler, or the user has another plugin.
    """
    plugin = _of_process()
    if (other := os.environ.get(VARIABLE, "")) not in ("", str(plugin.path)):
        raise TunerError(f"{VARIABLE}={other} is another plugin; unset it, so that NCCL uses dhelix's settings")
    os.environ[VARIABLE] = str(plugin.path)
    return plugin


def replaces_policy(environment: Mapping[str, str]) -> str:
    """The variable whose effect any tuner plugin takes away, with its value; "" if there is none.

    With NCCL_CTA_POLICY=1 (EFFICIENCY), NCCL runs all-gathers and reduce-scatters of registered buffers by NVLS, with
    few channels. It decides this only if there is no tuner plugin at all, whatever the plugin answers (getAlgoInfo in
    enqueue.cc, NCCL 2.27 to 2.30). Other policies do not depend on a plugin.
    """
    policy = environment.get(_POLICY, "")
    chooses = {"1", "EFFICIENCY"} & set(policy.upper().split("|")) and "ZERO" not in policy.upper()
    return f"{_POLICY}={policy}" if chooses and not any(environment.get(one) for one in _CHOSEN) else ""


@functools.cache
def _of_process() -> Plugin:
    return Plugin(build())


def build(folder: Path | None = None) -> Path:
    """Builds the library, unless it is there. Returns its path.

    Args:
      folder: where it is kept; default: the user's cache.

    Raises:
      TunerError: there is no C compiler, it fails, or the folder cannot be written.
    """
    here = Path(__file__).parent
    sources = [(here / name).read_bytes() for name in _SOURCES]
    digest = blake2b(b"\0".join([*sources, " ".join(_FLAGS).encode()]), digest_size=8).hexdigest()
    try:
        folder = (_FOLDER if folder is None else folder).expanduser() / digest
    except RuntimeError as error:
        raise TunerError(f"there is no place for the NCCL tuner plugin: {error} Set HOME") from None
    library = folder / "libnccl-tuner-dhelix.so"
    if library.is_file():
        return library
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise TunerError(f"settings of collectives need a C compiler ({', '.join(_COMPILERS)}): install one, or set CC")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work, library.name)
            command = [*compiler.split(), *_FLAGS, "-o", str(made), str(here / _SOURCES[0])]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = " ".join(done.stderr.split())[:300]
                raise TunerError(f"{compiler} cannot build the NCCL tuner plugin: {said or 'it said nothing'}")
            made.replace(library)  # at once, so that other processes never see half of it
    except OSError as error:
        raise TunerError(f"cannot build the NCCL tuner plugin in {folder}: {error}") from None
    return library
