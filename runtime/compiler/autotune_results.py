"""Reads and merges files with the choices that XLA's autotuner made on a GPU. Other compilations can use the choices.

    XLA_FLAGS=--xla_gpu_dump_autotune_results_to=8b.pbtxt dhelix train --preset llama-8b ...     # on the GPU
    python -m dhelix.runtime.compiler.autotune_results h200.autotune.pbtxt 25b.pbtxt 8b.pbtxt    # merges two files

A file is an `xla.autotuner.AutotuneCache` in text form. Each entry names the chosen backend of one instruction:
cuBLASLt with an algorithm, Triton with tile sizes, or one of XLA's own emitters. XLA finds an entry by

- the device: a hash of its compute capability, cores, clock, memory bandwidth and L2 size, but not of its name;
- the instruction: a hash of its HLO with types and layouts, without names and metadata;
- the versions of the backends (Triton's commit, cuBLAS's number). XLA does not use an entry if the version of the
  entry's backend differs. The versions of other backends do not matter.

Merged files have one entry per line, in sorted order. So the same dumps give the same bytes, and diffs are readable.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax

from dhelix.errors import DhelixError
from dhelix.profiles.files import storage

SHIPPED = storage.SHIPPED
SUFFIX = ".autotune.pbtxt"
_ENTRY = re.compile(r"^entries \{(?: [^\n]* \}|\n.*?^\})$", re.MULTILINE | re.DOTALL)  # on one or several lines
_ONE_AT_A_TIME = threading.Lock()
_KEY = re.compile(r"entries \{ (key \{ .* \}) value \{ .* \} \}")
_SCOPE = re.compile(r'^\w+_scope: ".*"$|^#.*$', re.MULTILINE)


def merge(texts: Mapping[str, str]) -> str:
    """Merges several texts. Of entries with the same device, instruction and versions, the last is kept.

    Args:
      texts: the texts by name, usually a file name. Error messages use the name.

    Raises:
      DhelixError: a text holds something other than autotuning results in text form.
    """
    entries: dict[str, str] = {}
    for name, text in texts.items():
        if rest := _SCOPE.sub("", _ENTRY.sub("", text)).split():
            raise DhelixError(
                f"{name} holds {rest[0][:40]!r} instead of autotuning results in text form; leave out this file"
            )
        for found in _ENTRY.findall(text):
            entry = " ".join(found.split())
            key = _KEY.fullmatch(entry)
            if key is None:
                raise DhelixError(f"{name} has an entry without key or value, {entry[:80]!r}; leave out this file")
            entries[key[1]] = entry
    return "".join(f"{entries[key]}\n" for key in sorted(entries))


def merged(files: Iterable[Path]) -> str:
    """Merges files as `merge` merges texts. Raises DhelixError as `merge` does, and if a file cannot be read."""
    texts = {}
    for path in files:
        try:
            texts[str(path)] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DhelixError(f"{path}: cannot be read ({error}); leave out this file") from None
    return merge(texts)


@functools.cache
def file() -> Path | None:
    """Returns a file with all known autotuning results, or None if there are none.

    The file contains the shipped results and the user's results, which `dhelix profile` wrote next to the user's
    profiles. The user's results override shipped results. The results of all GPUs are in one file, because XLA reads
    only the first file that a process names. Raises DhelixError as `merged` does.
    """
    found = [path for folder in (SHIPPED, _users_folder()) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    if len(found) < 2:
        return next(iter(found), None)
    text = merged(found)
    with _ONE_AT_A_TIME:  # threads that compile may come here together
        path = Path(_folder().name, f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{SUFFIX}")
        if not path.exists():
            path.write_text(text, encoding="utf-8")
    return path


def _users_folder() -> Path:
    return storage.users_file("", "").parent


@contextlib.contextmanager
def blaming() -> Iterator[None]:
    """Around a compilation: says which files to delete if XLA cannot read the results. Raises DhelixError then."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "autotune results" not in str(error):
            raise
        own = ", ".join(str(path) for path in sorted(_users_folder().glob(f"*{SUFFIX}"))) or "the shipped profiles"
        raise DhelixError(
            f"XLA cannot read the autotuner's choices of {own}: delete this file, or write it again with dhelix profile"
        ) from None


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dhelix-autotune-")


def main(arguments: list[str]) -> None:
    """Runs the command line `OUT IN ...`: merges the files IN into the file OUT. OUT may be one of the files IN."""
    if len(arguments) < 2:
        raise SystemExit(
            "usage: python -m dhelix.runtime.compiler.autotune_results OUT IN [IN ...]; later files override earlier "
            "ones"
        )
    out, *sources = map(Path, arguments)
    try:
        text = merged(sources)
        out.write_text(text, encoding="utf-8")
    except (DhelixError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(f"{out}: {text.count(chr(10))} entries")


if __name__ == "__main__":
    main(sys.argv[1:])
