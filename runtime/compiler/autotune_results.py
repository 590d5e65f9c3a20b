"""What XLA's autotuner chose on a card, as a file that other compiles read.

    XLA_FLAGS=--xla_gpu_dump_autotune_results_to=8b.pbtxt dhelix train --preset llama-8b ...     # on the card
    python -m dhelix.runtime.compiler.autotune_results h200.autotune.pbtxt 25b.pbtxt 8b.pbtxt    # one file of two

A file is an `xla.autotuner.AutotuneCache` in text form. An entry says which backend an instruction is to have
(cuBLASLt with which algorithm, Triton with which tiles, which of XLA's own emitters) and is found by

- the device: a hash of compute capability, cores, clock, memory bandwidth and L2 size, not of the name;
- the instruction: a hash of its HLO with types and layouts, without names and metadata;
- the versions of the backends (Triton's commit, cuBLAS's number): another version of the one that was chosen is
  a miss, another version of any other is not.

Merged files have one entry a line, sorted, so that the same dumps give the same bytes and changes can be read.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from dhelix.errors import DhelixError
from dhelix.profiles.files import storage

SHIPPED = storage.SHIPPED
SUFFIX = ".autotune.pbtxt"
_ENTRY = re.compile(r"^entries \{(?: [^\n]* \}|\n.*?^\})$", re.MULTILINE | re.DOTALL)  # on one line, or on many
_KEY = re.compile(r"entries \{ (key \{ .* \}) value \{ .* \} \}")
_SCOPE = re.compile(r'^\w+_scope: ".*"$|^#.*$', re.MULTILINE)


def merge(texts: Mapping[str, str]) -> str:
    """One text for several: of entries for the same device, instruction and versions the last one counts.

    Args:
      texts: by the names that errors are to give them, usually those of files.

    Raises DhelixError for what is no such text.
    """
    entries: dict[str, str] = {}
    for name, text in texts.items():
        if rest := _SCOPE.sub("", _ENTRY.sub("", text)).split():
            raise DhelixError(f"{name}: no autotuning results in text form, but {rest[0][:40]!r}; leave this file out")
        for found in _ENTRY.findall(text):
            entry = " ".join(found.split())
            key = _KEY.fullmatch(entry)
            if key is None:
                raise DhelixError(f"{name}: an entry without key or value, {entry[:80]!r}; leave this file out")
            entries[key[1]] = entry
    return "".join(f"{entries[key]}\n" for key in sorted(entries))


def merged(files: Iterable[Path]) -> str:
    """`merge` of files. Raises DhelixError, also for a file that cannot be read."""
    texts = {}
    for path in files:
        try:
            texts[str(path)] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DhelixError(f"{path}: cannot be read ({error}); leave this file out") from None
    return merge(texts)


@functools.cache
def file() -> Path | None:
    """What comes with dhelix, overridden by what `dhelix profile` left beside the user's profiles; None without any.

    One file for all GPUs, because XLA reads only the first that a process names. Raises DhelixError as `merged`.
    """
    folders = (SHIPPED, storage.users_file("", "").parent)
    found = [path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]
    if len(found) < 2:
        return next(iter(found), None)
    text = merged(found)
    path = Path(_folder().name, f"all{SUFFIX}")
    path.write_text(text, encoding="utf-8")
    return path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dhelix-autotune-")


def main(arguments: list[str]) -> None:
    """Merges files: `OUT IN IN ...`; an IN may be OUT."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m dhelix.runtime.compiler.autotune_results OUT IN [IN ...]; later ones count")
    out, *sources = map(Path, arguments)
    try:
        text = merged(sources)
        out.write_text(text, encoding="utf-8")
    except (DhelixError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(f"{out}: {text.count(chr(10))} entries")


if __name__ == "__main__":
    main(sys.argv[1:])
