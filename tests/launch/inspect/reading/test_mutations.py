"""Damaged dumps: each becomes one sentence or a verified module, in bounded time and memory, and nothing else."""

from __future__ import annotations

import io
import random
import re
import resource
import time
from pathlib import Path

import pytest
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.inspect import command, picture, tables, targets
from dhelix.launch.inspect.flags import TABLES
from dhelix.launch.inspect.inspection import inspect_module
from dhelix.launch.inspect.reading import dumps
from dhelix.passes import jax_compat
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.hlo import HloModule
from dhelix.profiles.hardware import ALL
from dhelix.runtime.compiler import autotune_results, deviceless
from dhelix.tests.machine import slowness

SMALL = 16_000  # bytes
TESTDATA = Path(__file__).parents[3] / "testdata"
FILES = [path for path in sorted(TESTDATA.rglob("*.hlo")) if path.stat().st_size < SMALL]
TEXTS = [path.read_bytes() for path in FILES]
SECONDS, GIB = 5.0, 2**30
SPOILED = (b"999999999999999999999", b"-1", b"0", b"4294967296", b"{", b"}", b"(", b'"', b"=", b"", b"while", b"f32[]",
           b"tuple", b"\x00", b"\xff\xfe", b"<script>", b"\x1b[31m", b"\n")  # fmt: skip
TOKEN = re.compile(rb"[\w.\-%]+|[^\w\s]")


def damaged(source: bytes, chance: random.Random) -> bytes:
    """The source with one to four damages."""
    for _ in range(chance.randint(1, 4)):
        lines = source.split(b"\n")
        at = chance.randrange(len(source) or 1)
        token = chance.choice([*TOKEN.finditer(source)] or [re.match(b"", b"")])
        assert token is not None
        match chance.randrange(8):
            case 0:
                source = source[:at] + bytes((chance.randrange(256),)) + source[at + 1 :]
            case 1:
                source = source[:at]
            case 2:
                del lines[chance.randrange(len(lines))]
                source = b"\n".join(lines)
            case 3:
                lines.insert(chance.randrange(len(lines)), chance.choice(lines))
                source = b"\n".join(lines)
            case 4:
                chance.shuffle(lines)
                source = b"\n".join(lines)
            case 5 | 6:
                source = source[: token.start()] + chance.choice(SPOILED) + source[token.end() :]
            case _:
                other = chance.choice([*TOKEN.finditer(source)] or [token])
                source = source[: token.start()] + other[0] + source[token.end() :]
    return source


def outcome(file: Path) -> str:
    """Reads and inspects a file. Raises whatever is no DhelixError of one line."""
    try:
        module = dumps.read_file(file).module
        if not module.is_scheduled:
            module.schedule = {c: list(c.instructions) for c in module.computations}
        with dumps.blaming(file):
            found = inspect_module(module, Costs(ALL["H200"]))
    except DhelixError as error:
        assert str(error) and "\n" not in str(error)
        return "refused"
    command.to_json([found])
    picture.of(found)
    tables.print_tables([found], console=Console(file=io.StringIO(), width=144), show=TABLES)
    return "inspected"


def proto(text: bytes) -> bytes:
    return jax_compat.parse_hlo_text(text.decode())


@pytest.mark.parametrize("count", [60, pytest.param(5_000, marks=pytest.mark.slow)])
def test_damage_does_no_harm(count: int, tmp_path: Path) -> None:
    chance, file = random.Random(count), tmp_path / "damaged"
    protos = [proto(text) for text in TEXTS]
    limit = SECONDS * slowness()
    ends = {"refused": 0, "inspected": 0}
    for number in range(count):
        source = damaged(chance.choice(protos if number % 4 == 0 else TEXTS), chance)
        file.write_bytes(source)
        start = time.monotonic()
        try:
            ends[outcome(file)] += 1
        except Exception as error:
            (tmp_path / f"harm-{number}").write_bytes(source)
            raise AssertionError(f"{tmp_path}/harm-{number}: {error!r}") from error
        assert time.monotonic() - start < limit, number
    assert min(ends.values()) > count // 20, "damage of both kinds is tried"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 * GIB


BESIDE = {
    ".gpu_target_config.pbtxt": (deviceless.TARGETS / "h200.pbtxt").read_bytes(),
    ".sm_9.0_gpu_after_optimizations-buffer-assignment.txt": b"""BufferAssignment:
allocation 0: size 134217728, parameter 0, shape |f32[1024,8]| at ShapeIndex {0}, maybe-live-out:
 value: <1 a @0> (size=1,offset=0): f32[2]
allocation 1: size 99, preallocated-temp:
Used values:
""",
    ".autotune.pbtxt": b"\n".join(
        (autotune_results.SHIPPED / f"h200{autotune_results.SUFFIX}").read_bytes().split(b"\n")[:20]
    ),
}


@pytest.mark.parametrize("ending", BESIDE)
def test_damage_of_other_files_does_no_harm(ending: str, tmp_path: Path) -> None:
    """Each is read, or refused in one line."""
    chance, file = random.Random(7), tmp_path / f"module_0001.jit{ending}"
    dump = tmp_path / "module_0001.jit.sm_9.0_gpu_after_optimizations.txt"
    module = HloModule.from_text("HloModule m, is_scheduled=true\n\nENTRY e { ROOT a = f32[2] parameter(0) }\n")
    for _ in range(300):
        file.write_bytes(damaged(BESIDE[ending], chance))
        try:
            targets.choose(dump, module, None)
            dumps.read_memory(dump)
            autotune_results.merged(tmp_path.glob(f"*{autotune_results.SUFFIX}"))
        except DhelixError as error:
            assert str(error).isprintable()


def test_undamaged_texts_are_inspected() -> None:
    refused = [path.name for path in FILES if outcome(path) == "refused"]
    assert refused == ["calls.hlo"], "there, two fusions share a computation"
