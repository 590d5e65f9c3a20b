"""The tables of estimated steps, and paths that do not exist."""

from pathlib import Path

import pytest

from dhelix.launch import cli

TEXT = """HloModule jit_step, is_scheduled=true

ENTRY main {
  a = f32[1024,1024] parameter(0)
  b = f32[1024,1024] negate(a)
  ROOT c = f32[1024,1024] add(a, b)
}
"""
AS_XLA_SAYS = """BufferAssignment:
allocation 0: size 4194304, parameter 0, shape |f32[1024,1024]| at ShapeIndex {}:
allocation 1: size 12582912, output shape is |f32[1024,1024]|, maybe-live-out:
"""


def dhelix_inspect(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["inspect", *map(str, arguments)])
    return int(stopped.value.code or 0)


def rows(out: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in out.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in cells}


def test_memory_is_estimated_where_xla_does_not_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one := tmp_path / "one.txt").write_text(TEXT)
    (other := tmp_path / "other.txt").write_text(TEXT)
    assert dhelix_inspect(one, "--show=step") == 0
    out = capsys.readouterr().out
    assert rows(out)["memory: arguments, estimated"] == ["4.0 MiB"]
    assert rows(out)["memory: peak, estimated"] == ["12.0 MiB"]
    assert "Memory is estimated from the schedule" in out
    (tmp_path / "other-buffer-assignment.txt").write_text(AS_XLA_SAYS)
    assert dhelix_inspect(one, "--compare", other, "--show=step") == 0
    found = rows(capsys.readouterr().out)
    assert found["memory: peak, estimated"] == ["12.0 MiB", "-"]
    assert found["memory: peak"] == ["-", "16.0 MiB"]
    assert dhelix_inspect(other, "--show=step") == 0
    assert "estimated from the schedule" not in (out := capsys.readouterr().out) and "peak, estimated" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "missing: no such file or folder; give a file or folder of --xla_dump_to, or a profiler trace"),
        (["one.txt", "--compare=missing"], "missing: no such file or folder; give"),
        (["one.txt", "--png=nowhere/p.png"], "cannot write nowhere/p.png: give a file in a folder that exists"),
        (["one.txt", "--perfetto=nowhere/p.pb"], "cannot write nowhere/p.pb"),
        (["one.txt", "--html=nowhere/p.html"], "cannot write nowhere/p.html"),
        (["one.txt", "--gpu=1"], "--gpu chooses a GPU of a trace, and this is a dump"),
    ],
)
def test_wrong_paths_and_a_gpu_of_a_dump(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text(TEXT)
    assert dhelix_inspect(*arguments) == 1
    assert message in capsys.readouterr().err
