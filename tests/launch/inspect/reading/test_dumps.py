"""Reading dump files: content decides how a file is read, not its name. A file without a module gives one sentence."""

from __future__ import annotations

import codecs
import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading import dumps
from dhelix.passes import jax_compat
from dhelix.passes.hlo import HloModule

TEXT = """HloModule jit_step, is_scheduled=true

ENTRY main {
  a = f32[8] parameter(0)
  b = f32[8] negate(a)
  ROOT c = f32[8] add(a, b)
}
"""
PROTO = jax_compat.parse_hlo_text(TEXT)


def wrapped(message: bytes) -> bytes:
    """Wraps a message of less than 2**14 bytes as field 1 of another message."""
    return bytes((0x0A, len(message) & 0x7F | 0x80, len(message) >> 7)) + message


SNAPSHOT = wrapped(wrapped(PROTO)) + bytes((0x12, 2)) + b"xy"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("step.hlo", TEXT.encode()),
        ("step", TEXT.encode()),
        ("step.mlir", TEXT.encode()),
        ("step.hlo.gz", gzip.compress(TEXT.encode())),
        ("step.txt", codecs.BOM_UTF8 + TEXT.encode()),
        ("step.txt", TEXT.encode("utf-16")),
        ("step.txt", TEXT.replace("ROOT c", "// \xe9\n  ROOT c").encode("latin-1")),
        ("step.txt", b"I1125 10:00:00 compiler: dumped\n" + TEXT.encode() + b"Segmentation fault\n"),
        ("step.txt", PROTO),
        ("step.pb", PROTO),
        ("step.hlo.pb", wrapped(PROTO)),
        ("step.hlo.pb.gz", gzip.compress(wrapped(PROTO))),
        ("step.hlo_snapshot.pb", SNAPSHOT),
    ],
)
def test_a_module_is_read_whatever_its_file_is_called(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    found = dumps.read(file)
    assert found.file == file
    assert [i.name for i in found.module.entry.instructions] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "holds no HLO module"),
        (pickle.dumps({"a": [1, 2, 3]}), "holds no HLO module"),
        (PROTO[:-20], "holds no HLO module .*cut short"),
        (wrapped(PROTO)[:-20], "holds no HLO module .*cut short"),
        (b"ML\xefR\r" + bytes(range(64)), "is MLIR bytecode, the program before XLA compiled it; give"),
        (b"module @jit_f {\n}\n", r"is MLIR .*before XLA compiled it; give \*after_optimizations"),
        (gzip.compress(TEXT.encode())[:-12], "is a damaged gzip file .*; copy it again"),
        (b"\x1f\x8bnothing", "is a damaged gzip file"),
        (b"Dear reader,\nno module here.\n", "no line starts with `HloModule`"),
        (TEXT[:-9].encode(), "cut short: the text ends in line 6, inside the module; dump or copy it again"),
        (TEXT.replace("add(a", "plus(a").encode(), r"cannot read from line 6 on: .*\(XLA: .*Unknown opcode: plus\)"),
        (b"log\nlog\n" + TEXT.replace("add(a", "plus(a").encode(), "cannot read from line 8 on"),
        (TEXT.replace("parameter(0)", "parameter(3)").encode(), "is not a valid module"),
        (TEXT.replace(", is_scheduled=true", "").encode(), "is not scheduled, but estimates need a schedule; dump"),
    ],
)
def test_what_holds_no_module_gets_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "given"
    file.write_bytes(content)
    with pytest.raises(DhelixError, match=f"^{file} .*{message}") as error:
        dumps.read(file)
    assert "\n" not in str(error.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DhelixError, match="pipe is not a file"):
        dumps.read(tmp_path / "pipe")
    with pytest.raises(DhelixError, match="no such file or folder"):
        dumps.read(tmp_path / "missing")


def damaged(damage: Callable[[HloModule], object]) -> bytes:
    module = HloModule.from_bytes(PROTO)
    damage(module)
    return module.to_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            damaged(lambda m: m.schedule[m.entry].reverse()),
            r"its schedule, .*, cannot run.*; dump or copy it again \(schedule of main: c runs before a",
        ),
        (
            damaged(lambda m: m.schedule[m.entry].pop()),
            r"its schedule, .*, cannot run.*; dump or copy it again \(schedule of main lacks c",
        ),
        (
            damaged(lambda m: setattr(m.entry.instructions[1].proto, "name", "a")),
            "the name is taken; dump or copy it again",
        ),
    ],
)
def test_a_module_is_verified_before_anything_is_computed(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.hlo.pb").write_bytes(content)
    with pytest.raises(DhelixError, match=f"is not a valid module: .*{message}"):
        dumps.read(tmp_path / "x.hlo.pb")


UNSCHEDULED = TEXT.replace(", is_scheduled=true", "")
AFTER = "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt"


@pytest.mark.parametrize(
    ("name", "others", "advice"),
    [
        ("module_0001.jit_step.before_optimizations.txt", {AFTER: TEXT}, f"give {AFTER} in the same folder"),
        ("module_0001.jit_step.before_optimizations.txt", {AFTER: UNSCHEDULED}, "dump with XLA_FLAGS="),
        ("module_0002.jit_step.before_optimizations.txt", {AFTER: TEXT}, "dump with XLA_FLAGS="),
        ("mine.hlo", {f"other/{AFTER}": TEXT}, "dump with XLA_FLAGS="),
        ("mine.hlo", {AFTER: TEXT}, "dump with XLA_FLAGS="),
        (AFTER, {}, "its writer makes no schedule: compile the step with JAX for GPUs"),
    ],
)
def test_advice_names_another_file_of_the_same_module_or_none(
    tmp_path: Path, name: str, others: dict[str, str], advice: str
) -> None:
    (tmp_path / "other").mkdir()
    for other, text in {name: UNSCHEDULED, **others}.items():
        (tmp_path / other).write_text(text)
    with pytest.raises(DhelixError, match=f"{name} is not scheduled, .*; {advice}"):
        dumps.read(tmp_path / name)


def test_a_folder_of_packed_files_of_another_tool(tmp_path: Path) -> None:
    (tmp_path / "small_after_optimizations.txt").write_text(TEXT)
    source = os.urandom(500).hex()  # random text, which gzip compresses poorly
    large = TEXT.replace("jit_step", "jit_large").replace("negate(a)", f'negate(a), metadata={{op_name="{source}"}}')
    (tmp_path / f"{AFTER}.gz").write_bytes(gzip.compress(large.encode()))
    found = dumps.read(tmp_path)
    assert found.module.name == "jit_large"
    assert found.notes == (f"{AFTER}.gz is the largest module of {tmp_path}",)


def test_text_that_cannot_be_read_beside_its_proto(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(TEXT.replace("add(a", "plus(a"))
    with pytest.raises(DhelixError, match="dump with XLA_FLAGS="):
        dumps.read(tmp_path / "x.txt")
    (tmp_path / "x.hlo.pb").write_bytes(wrapped(PROTO))
    with pytest.raises(DhelixError, match="give x.hlo.pb in the same folder, which every version reads"):
        dumps.read(tmp_path / "x.txt")


def test_notes_say_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(TEXT.replace("negate(a)", "negate(a), made_up=7") + "// end\nbye\n")
    left_out, after = sorted(dumps.read(tmp_path / "x.txt").notes)
    assert left_out.startswith("left out attributes that jaxlib") and left_out.endswith(
        "cannot read: made_up of negate"
    )
    assert after == "the text from line 9 on is not part of the module"


@pytest.mark.parametrize("address", ["", "0x27017c46b600, "])
def test_memory_is_the_device_s_and_the_host_s_apart(tmp_path: Path, address: str) -> None:
    """Offloaded arrays take no GPU memory. Old dumps also give addresses, and they give no pages."""
    lines = (
        "size 1000, parameter 0, shape f32[250] at ShapeIndex {}:",
        "size 500, maybe-live-out:",
        "size 300, color 1, preallocated-temp:",  # device memory that is registered with NCCL
        "size 4000, color 5, page 0, preallocated-temp:",
        "size 70, color 5, page 0, parameter 1, shape |f32[17]| at ShapeIndex {}:",
    )
    buffers = "\n".join(f"allocation {n}: {address}{line}" for n, line in enumerate(lines))
    (tmp_path / "m.after_optimizations-buffer-assignment.txt").write_text(f"BufferAssignment:\n{buffers}\n")
    found = dumps.read_memory(tmp_path / "m.after_optimizations.txt")
    assert found is not None
    assert (found.arguments, found.outputs, found.temporaries, found.host) == (1000, 500, 300, 4070)
    assert found.peak == 1800


def test_copied_computations_run_in_the_order_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "copied").write_text(TEXT.partition("\n")[2])
    found = dumps.read(tmp_path / "copied")
    assert [i.name for i in found.module.schedule[found.module.entry]] == ["a", "b", "c"]
    assert found.notes == ("the text has no HloModule line: its computations are one module, in the order of the text",)


def test_names_are_printed_and_not_obeyed(tmp_path: Path) -> None:
    """A name may hold line breaks, colours and markup."""
    module = HloModule(PROTO, "")
    module.entry.instructions[1].proto.name = "b\x1b[31m\n<b>[red]"
    (tmp_path / "step.pb").write_bytes(module.to_bytes())
    assert [i.name for i in dumps.read(tmp_path / "step.pb").module.entry.instructions][1] == "b\\x1b[31m\\x0a<b>[red]"
    module.entry.instructions[1].proto.shape.dimensions.append(3)
    (tmp_path / "step.pb").write_bytes(module.to_bytes().replace(b"negate", b"nothing")[:-3])
    with pytest.raises(DhelixError) as error:
        dumps.read(tmp_path / "step.pb")
    assert str(error.value).isprintable()
