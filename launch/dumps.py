"""Finding and reading the scheduled module in what `--xla_dump_to` writes, and the memory it says it needs.

A dump folder holds each module several times: before and after optimizations, and at stages between. Only
the last one, `*after_optimizations*`, is scheduled; XLA writes it as text and, with
`--xla_dump_hlo_as_proto`, as `.hlo.pb`, which any version reads. Beside it lies the buffer assignment, which
says how much memory is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxlib import version

from dhelix.errors import DhelixError
from dhelix.passes.hlo import HloModule

_AFTER = "after_optimizations"
_HOW = "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text --xla_dump_hlo_as_proto'"
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$")


@dataclass(frozen=True)
class Memory:
    """What one device needs for the step, in bytes. Aliased bytes are outputs that live in donated arguments.

    Attributes:
      source: where the numbers come from, for people to read.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    source: str

    @property
    def peak(self) -> int:
        """Arguments, outputs and temporaries together; aliased memory counts once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def find_module(path: str | Path) -> Path:
    """The file to read: `path` itself, or the largest `*after_optimizations*` module of a folder.

    Raises:
      DhelixError: no such path, or a folder without such a file.
    """
    path = Path(path)
    if not path.exists():
        raise DhelixError(f"{path}: no such file or folder; give a file or folder of --xla_dump_to")
    if not path.is_dir():
        return path
    modules = _modules(path)
    if not modules:
        other = next((p for p in sorted(path.rglob("*")) if p.name.endswith((".hlo.pb", ".txt"))), None)
        reason = f"holds {other.name} but no *{_AFTER}* file" if other else "holds no HLO dump"
        raise DhelixError(f"{path} {reason}; compile the step with {_HOW}")
    sizes: dict[Path, int] = {}
    for file in modules:  # text and proto of one module count as one
        sizes[_stem(file)] = max(sizes.get(_stem(file), 0), file.stat().st_size)
    largest = max(sizes, key=lambda stem: (sizes[stem], str(stem)))
    return next(file for file in modules if _stem(file) == largest)  # .hlo.pb sorts before .txt


def read_module(path: Path) -> HloModule:
    """Reads a scheduled module. Raises DhelixError when it does not parse or is not scheduled."""
    module = _read_text(path) if path.suffix in (".txt", ".hlo") else HloModule.from_file(path)
    if not module.is_scheduled:
        beside = find_module(path.parent) if any(_modules(path.parent)) else None
        hint = f"give {beside.name} of the same folder" if beside else f"dump with {_HOW} and give *{_AFTER}*"
        raise DhelixError(f"{path} is not scheduled, and estimates follow the schedule; {hint}")
    return module


def read_memory(module_file: Path) -> Memory | None:
    """Memory from the buffer assignment that XLA writes beside the module; None where there is none."""
    path = Path(f"{_stem(module_file)}-buffer-assignment.txt")
    if not path.is_file():
        return None
    arguments = outputs = aliased = temporaries = 0
    for line in path.read_text().splitlines():
        if line.startswith("Used values"):
            break
        found = _ALLOCATION.match(line)
        if found is None:
            continue
        size, description = int(found[1]), found[2]
        is_argument, is_output = " parameter " in description, "maybe-live-out" in description
        if " thread-local" in description or " constant" in description:
            continue
        arguments += size * is_argument
        outputs += size * is_output
        aliased += size * (is_argument and is_output)
        temporaries += size * (not is_argument and not is_output)
    return Memory(arguments, outputs, aliased, temporaries, path.name)


def read_gpu(module_file: Path, known: Iterable[str]) -> str | None:
    """Which of the known GPUs a module was compiled for, as the dump says; None where it does not."""
    path = _stem(module_file)
    path = path.with_name(f"{path.name.partition('.sm_')[0]}.gpu_target_config.pbtxt")
    description = path.read_text() if path.is_file() else ""
    return next((name for name in sorted(known) if re.search(rf"\b{name}\b", description)), None)


def _read_text(path: Path) -> HloModule:
    try:
        text = path.read_text()
    except (UnicodeDecodeError, FileNotFoundError):
        raise DhelixError(f"{path} is no text; HLO in binary form is called .pb or .hlo.pb") from None
    if not re.search(r"^HloModule ", text, re.MULTILINE):
        raise DhelixError(f"{path} holds no HLO module (no line starts with `HloModule`); give *{_AFTER}.txt")
    try:
        return HloModule.from_text(text)
    except DhelixError as error:
        raise DhelixError(f"{path} {_why_unreadable(text, str(error))}") from None


def _why_unreadable(text: str, error: str) -> str:
    """XLA's parser answers with several lines of its own; what a user can act on is in the first."""
    lines = text.rstrip().splitlines()
    if lines[-1].strip() != "}" or not any(line.startswith("ENTRY ") for line in lines):
        return f"is cut short: the text ends in line {len(lines)}, inside of the module; dump or copy it again"
    found = re.search(r"was parsing (\d+):\d+: error: (.*?)(?= was parsing |$)", " ".join(error.split()))
    where = f"line {found[1]}" if found else "some line"
    return (
        f"is HLO text that jaxlib {version.__version__} cannot read from {where} on, so another version wrote it; give"
        " the .hlo.pb of that dump, which every version reads"
    )


def _modules(folder: Path) -> list[Path]:
    """Scheduled modules of a dump folder, `.hlo.pb` before `.txt`."""
    endings = (f"{_AFTER}.hlo.pb", f"{_AFTER}.txt")
    return [path for path in sorted(folder.rglob(f"*{_AFTER}*")) if path.name.endswith(endings)]


def _stem(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".txt").removesuffix(".pb").removesuffix(".hlo"))
