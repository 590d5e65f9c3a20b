"""Reads what `--xla_dump_to` wrote: the scheduled module, and the memory that the step needs.

A dump folder holds each module several times: before and after optimizations, and at stages in between. Only the
version after all optimizations, `*after_optimizations*`, is scheduled. XLA writes this version as text and, with
`--xla_dump_hlo_as_proto`, as `.hlo.pb`. Every version of XLA can read `.hlo.pb`. The buffer assignment in the same
folder says how much memory the step needs.

A file is HLO text or a proto, and may be packed by gzip. The format is recognized by the content, not by the name.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxlib import version

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading import bounds, hlo_text, refusals, repairs
from dhelix.launch.inspect.reading.parser_process import PARSER, ParserStopped
from dhelix.passes.hlo import HloModule, verify

_AFTER = "after_optimizations"
_HOW = "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text --xla_dump_hlo_as_proto'"
_AGAIN = "dump or copy it again"
_GIVE = f"give *{_AFTER}.hlo.pb or .txt of {_HOW}"
_ENDINGS = tuple(f"{_AFTER}{ending}{packed}" for ending in (".hlo.pb", ".txt") for packed in ("", ".gz"))
_ALLOCATION = re.compile(r"^allocation \d+: (?:0x[0-9a-f]+, )?size (\d+),( .*)$")  # old dumps also have the address
_ON_HOST = " color 5, "  # XLA's number of the memory space on the host
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # bytes that occur in every proto and in no text
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MLIR_BYTECODE = b"ML\xefR"


@dataclass(frozen=True)
class Memory:
    """The memory that one device needs for the step, in bytes.

    Attributes:
      aliased: size of the outputs that are stored in donated arguments.
      source: words that say where the numbers come from.
      host: bytes in the host's memory. The other numbers do not include these bytes.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    source: str
    host: int = 0

    @property
    def peak(self) -> int:
        """Arguments, outputs and temporaries together. Aliased memory counts once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class Dump:
    """A verified module, its file, and remarks for the user on how the file was read."""

    file: Path
    module: HloModule
    notes: tuple[str, ...] = ()


def read(path: str | Path) -> Dump:
    """Reads the scheduled module in the file that `find_module` chooses for `path`.

    Raises:
      DhelixError: the path has no readable HLO, or the module is not scheduled or not valid.
    """
    found = read_file(find_module(path))
    if not found.module.is_scheduled:
        raise DhelixError(f"{found.file} is not scheduled, but estimates need a schedule; {_scheduled(found.file)}")
    if Path(path).is_dir():
        found = replace(found, notes=(f"{found.file.name} is the largest module of {path}", *found.notes))
    return found


def read_file(file: Path) -> Dump:
    """Reads the module of a file, with or without a schedule.

    Raises:
      DhelixError: the file has no readable HLO, or the module is not valid.
    """
    with blaming(file):
        module, notes = _read(file)
        try:
            verify(module)
            bounds.check(module)
        except DhelixError as error:
            why = refusals.of_verified(str(error), _AGAIN)
            raise DhelixError(f"{file} is not a valid module: {why}") from None
        _make_printable(module)
        return Dump(file, module, tuple(notes))


def printable(text: str) -> str:
    """The text with escapes for characters that a terminal would obey, such as line breaks and colours."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _make_printable(module: HloModule) -> None:
    protos = [i.proto for computation in module.computations for i in computation.instructions]
    for name in ("name", "custom_call_target"):
        for proto in protos:
            if not getattr(proto, name).isprintable():
                setattr(proto, name, printable(getattr(proto, name)))
    for proto in protos:
        if not proto.metadata.op_name.isprintable():
            proto.metadata.op_name = printable(proto.metadata.op_name)
    if not module.proto.name.isprintable():
        module.proto.name = printable(module.proto.name)


@contextlib.contextmanager
def blaming(file: Path) -> Iterator[None]:
    """Explains an error in the block by the damage of a file's module, if XLA takes the module for invalid, too.

    `verify` does not check all that XLA checks. Without an error in the block, XLA is not asked, because it knows less
    than `verify` of modules that other versions wrote.

    Raises:
      DhelixError: instead of an error that is none.
    """

    def module() -> bytes:
        data = _content(file)
        text = _text(data)
        return HloModule.unwrapped(data) if text is None else _parsed(file, text)[0].module.to_bytes()

    with blaming_module(f"{file} is not a valid module", module):
        yield


@contextlib.contextmanager
def blaming_module(what: str, module: Callable[[], bytes]) -> Iterator[None]:
    """Like `blaming`, for a module that is no file of its own. `what` begins the message."""
    try:
        yield
    except DhelixError as error:
        raise DhelixError(printable(str(error))) from error.__cause__
    except Exception as error:
        doubt = PARSER.doubt(module())
        if not doubt:
            raise
        raise DhelixError(f"{what}: {refusals.of_module(doubt, _AGAIN)}") from error


def find_module(path: str | Path) -> Path:
    """The file to read: `path` itself, or the largest `*after_optimizations*` module of a folder.

    Raises:
      DhelixError: the path does not exist, or the folder has no such file.
    """
    path = Path(path)
    if not path.exists():
        raise DhelixError(f"{path}: no such file or folder; give a file or folder of --xla_dump_to")
    if not path.is_dir():
        return path
    modules = [file for file in sorted(path.rglob(f"*{_AFTER}*")) if file.name.endswith(_ENDINGS)]
    if not modules:
        other = next((p for p in sorted(path.rglob("*")) if p.name.endswith((".hlo.pb", ".txt"))), None)
        reason = f"holds {other.name} but no *{_AFTER}* file" if other else "holds no HLO dump"
        raise DhelixError(f"{path} {reason}; compile the step with {_HOW}")
    sizes: dict[Path, int] = {}
    for file in modules:  # the text and the proto of a module have the same stem
        sizes[stem(file)] = max(sizes.get(stem(file), 0), file.stat().st_size)
    largest = max(sizes, key=lambda stem: (sizes[stem], str(stem)))
    return next(file for file in modules if stem(file) == largest)  # .hlo.pb sorts before .txt


def read_memory(module_file: Path) -> Memory | None:
    """The memory according to the buffer assignment that XLA wrote next to the module; None if there is none."""
    path = Path(f"{stem(module_file)}-buffer-assignment.txt")
    if not path.is_file():
        return None
    arguments = outputs = aliased = temporaries = host = 0
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("Used values"):
            break
        found = _ALLOCATION.match(line)
        if found is None:
            continue
        size, description = int(found[1]), found[2]
        is_argument, is_output = " parameter " in description, "maybe-live-out" in description
        if " thread-local" in description or " constant" in description:
            continue
        if _ON_HOST in description:
            host += size
            continue
        arguments += size * is_argument
        outputs += size * is_output
        aliased += size * (is_argument and is_output)
        temporaries += size * (not is_argument and not is_output)
    return Memory(arguments, outputs, aliased, temporaries, path.name, host)


def memory_of(compiled: Any) -> Memory | None:
    """The memory according to `memory_analysis()` of a `jax.stages.Compiled`; None if the backend cannot tell."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        "memory_analysis() of the compiled step",
        stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
    )


def stem(path: Path) -> Path:
    """The path without format endings, such as `.hlo.pb` or `.txt.gz`. All files of one module have the same stem."""
    name = path.name.removesuffix(".gz").removesuffix(".txt").removesuffix(".pb").removesuffix(".hlo")
    return path.with_name(name)


def _read(file: Path) -> tuple[HloModule, list[str]]:
    data = _content(file)
    if data.startswith(_MLIR_BYTECODE):
        raise DhelixError(f"{file} is MLIR bytecode, the program before XLA compiled it; {_GIVE}")
    text = _text(data)
    if text is None:
        return HloModule.from_proto(data, str(file)), []
    repaired, notes = _parsed(file, text)
    if repaired.left_out:
        notes.append(
            f"left out attributes that jaxlib {version.__version__} cannot read: {', '.join(repaired.left_out)}"
        )
    return repaired.module, notes


def _parsed(file: Path, text: str) -> tuple[repairs.Repaired, list[str]]:
    """The module of a file's text, and notes on what else the text holds."""
    try:
        modules = hlo_text.find_modules(text)
    except DhelixError as error:
        raise DhelixError(f"{file} {error}; {_GIVE}") from None
    chosen, notes = hlo_text.choose(modules)
    if not chosen.is_whole:
        raise DhelixError(f"{file} is cut short: the text ends in line {chosen.last_line}, inside the module; {_AGAIN}")
    try:
        return repairs.read(chosen.text), notes
    except ParserStopped as error:
        why = refusals.of_stopped(str(error), _instead(file))
        raise DhelixError(f"{file} is not a valid module: {why}") from None
    except DhelixError as error:
        why = refusals.of_text(chosen.text, str(error), chosen.line, _instead(file))
        raise DhelixError(f"{file} {why}") from None


def _content(file: Path) -> bytes:
    if not file.is_file():
        raise DhelixError(f"{file} is not a file; give a file or folder of --xla_dump_to")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DhelixError(f"{file} cannot be read ({error.strerror}); check its permissions") from None
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DhelixError(f"{file} is a damaged gzip file ({error}); copy it again") from None


def _text(data: bytes) -> str | None:
    """`data` decoded as text; None if `data` is binary."""
    if data.startswith(_UTF16):
        return data.decode("utf-16", errors="replace")
    return None if _BINARY.search(data) else data.decode("utf-8-sig", errors="replace")


def _instead(file: Path) -> str:
    """Advice on which file to give instead of a text that cannot be read."""
    proto = stem(file).with_name(f"{stem(file).name}.hlo.pb")
    if proto != file and proto.is_file() and proto.stat().st_size:
        return f"give {proto.name} in the same folder, which every version reads"
    return f"dump with {_HOW} and give *{_AFTER}.hlo.pb, which every version reads"


def _scheduled(file: Path) -> str:
    """Advice on which file to give instead of a module without a schedule."""
    beside = _scheduled_beside(file)
    if beside:
        return f"give {beside.name} in the same folder"
    if _AFTER in file.name:
        return "its writer makes no schedule: compile the step with JAX for GPUs"
    return f"dump with {_HOW} and give *{_AFTER}*"


def _scheduled_beside(file: Path) -> Path | None:
    """The file in the same folder that holds the same module with a schedule, or None.

    The names of both files begin alike, as in `module_0001.jit_step`.
    """
    module = re.match(r"module_\d+\.[^.]+\.", file.name)
    for other in sorted(file.parent.glob(f"{module[0]}*")) if module else ():
        is_text = other.name.endswith(".txt")
        if stem(other) == stem(file) or not other.name.endswith(_ENDINGS):
            continue
        if not is_text or "is_scheduled=true" in other.read_text(errors="replace"):
            return other
    return None
