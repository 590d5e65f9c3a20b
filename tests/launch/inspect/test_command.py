"""`dhelix inspect` on a small module: a GEMM over an all-gather, a copy and an all-reduce in a loop."""

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch import cli
from dhelix.launch.inspect import command as inspect
from dhelix.launch.inspect import picture
from dhelix.launch.inspect.inspection import Inspection
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.inspect.tables import print_tables
from dhelix.launch.shown import instruction_words
from dhelix.passes.hlo import HloModule

BIG = "bf16[4096,4096]{1,0}"
STATE = f"(s32[], {BIG}, {BIG})"
TEXT = f"""HloModule jit_step, is_scheduled=true

add {{
  a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT c = bf16[] add(a, b)
}}

gather {{
  part = bf16[1024,4096]{{1,0}} parameter(0)
  ROOT all-gather.1 = {BIG} all-gather(part), channel_id=1, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
}}

condition {{
  state.1 = {STATE} parameter(0)
  i.1 = s32[] get-tuple-element(state.1), index=0
  limit = s32[] constant(5)
  ROOT less = pred[] compare(i.1, limit), direction=LT
}}

body {{
  state = {STATE} parameter(0)
  i = s32[] get-tuple-element(state), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  x = {BIG} get-tuple-element(state), index=1
  w = {BIG} get-tuple-element(state), index=2
  mine = bf16[1024,4096]{{1,0}} slice(x), slice={{[0:1024], [0:4096]}}
  all-gather-start.1 = ((bf16[1024,4096]{{1,0}}), {BIG}) async-start(mine), calls=gather, \
metadata={{op_name="jit(step)/strand_beta/while/body/all_gather"}}
  dot.1 = {BIG} dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="jit(step)/strand_alpha/while/body/transpose(jvp())/dot_general"}}
  all-gather-done.1 = {BIG} async-done(all-gather-start.1)
  copy.1 = {BIG} copy(dot.1)
  all-reduce.1 = {BIG} all-reduce(copy.1), channel_id=2, replica_groups={{{{0,1,2,3}}}}, to_apply=add
  sum = {BIG} add(all-reduce.1, all-gather-done.1)
  ROOT result = {STATE} tuple(next, sum, w)
}}

ENTRY main {{
  x.2 = {BIG} parameter(0)
  w.2 = {BIG} parameter(1)
  zero = s32[] constant(0)
  start = {STATE} tuple(zero, x.2, w.2)
  while.1 = {STATE} while(start), condition=condition, body=body
  copy.2 = {BIG} copy(w.2)
  ROOT out = {BIG} get-tuple-element(while.1), index=1
}}
"""
BUFFERS = """BufferAssignment:
allocation 0: size 1000, page 0, parameter 0, shape |bf16[..]| at ShapeIndex {}, maybe-live-out:
 value: <9 x.2 @0> (size=1000,offset=0): bf16[..]
allocation 1: size 30, page 0, parameter 1, shape |bf16[..]| at ShapeIndex {}:
allocation 2: size 500, page 0, maybe-live-out:
allocation 3: size 7, page 0, thread-local:
allocation 4: size 7000, page 0, preallocated-temp:
 value: <10 copy @0> (size=7000,offset=0): bf16[..]
"""
NAME = "module_0001.jit_step.sm_9.0a_gpu_after_optimizations"

Dump = Callable[..., Path]


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    """Writes a dump folder with one module (text and proto) and the other files that XLA writes."""

    def write(folder: str = "dump", text: str = TEXT, name: str = NAME) -> Path:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / f"{name}.txt").write_text(text)
        module = HloModule.from_text(text).to_bytes()
        size = len(module).to_bytes(4, "little")  # HloProto: tag of field 1, length as a varint, module
        length = bytes(b for b in (size[0] & 0x7F | 0x80, (len(module) >> 7) & 0x7F | 0x80, len(module) >> 14))
        (path / f"{name}.hlo.pb").write_bytes(b"\x0a" + length + module)
        (path / f"{name}-buffer-assignment.txt").write_text(BUFFERS)
        (path / "module_0001.jit_step.gpu_target_config.pbtxt").write_text('name: "NVIDIA H100"')
        unscheduled = text.replace("is_scheduled=true", "is_scheduled=false")
        (path / "module_0001.jit_step.before_optimizations.txt").write_text(unscheduled)
        return path

    return write


def dhelix_inspect(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["inspect", *map(str, arguments)])
    return stopped.value.code or 0  # type: ignore[return-value]


def check(found: Inspection) -> None:
    gather, reduce = sorted(found.collectives, key=lambda c: c.kind)
    assert (gather.kind, gather.part, gather.loops, gather.executions) == (
        "all-gather",
        "beta",
        ("while.1",),
        5,
    )
    assert (gather.bytes, gather.devices) == (32 * 2**20, 4)
    assert gather.hidden_ms > 0 and gather.exposed_ms < gather.alone_ms
    assert [u.what for u in gather.under] == ["GEMM"]
    assert (reduce.kind, reduce.executions, reduce.hidden_ms) == ("all-reduce", 5, 0)
    assert reduce.exposed_ms == pytest.approx(reduce.alone_ms)
    assert found.collectives[0] is reduce  # most exposed first
    assert found.exposed_ms == pytest.approx(gather.exposed_ms + reduce.exposed_ms)
    assert found.hidden_ms == pytest.approx(gather.hidden_ms)
    assert found.communication_alone_ms == pytest.approx(gather.alone_ms + reduce.alone_ms)
    assert found.step_ms == pytest.approx(found.compute_ms + found.exposed_ms)
    (copy,) = found.copies  # only copies inside loops are listed
    assert (copy.instruction, copy.kind, copy.bytes, copy.executions) == ("copy.1", "copy", 32 * 2**20, 5)


def test_what_it_finds(dump: Dump) -> None:
    found = inspect.inspect_dump(dump())
    check(found)
    assert found.cost_model == "roofline"
    assert found.hardware == "H100"  # the GPU that the dump was compiled for
    assert found.source.endswith(f"{NAME}.hlo.pb")
    assert found.memory is not None
    memory = found.memory
    assert (memory.arguments, memory.outputs, memory.aliased, memory.temporaries) == (1030, 1500, 1000, 7000)
    assert memory.peak == 8530


def test_text_and_proto_say_the_same(dump: Dump) -> None:
    folder = dump()
    text, proto = (inspect.inspect_dump(folder / f"{NAME}.{end}").to_dict() for end in ("txt", "hlo.pb"))
    assert {**text, "source": ""} == {**proto, "source": ""}


def test_picture(dump: Dump) -> None:
    drawn = picture.of(inspect.inspect_dump(dump()))
    assert drawn.lanes == ["compute", "communication"]
    assert sum(bar.name == "dot.1" for bar in drawn.bars) == 5
    assert {bar.key for bar in drawn.bars if bar.name == "dot.1"} == {"alpha"}
    assert {bar.key for bar in drawn.bars if bar.name == "copy.1"} == {"copy"}
    (window,) = drawn.zoom
    starts = [bar.start for bar in drawn.bars if bar.name == "next"]  # the first instruction of the body
    assert window.start == pytest.approx(starts[2])  # the third of five iterations
    assert window.end == pytest.approx(starts[3])


FUSION = """HloModule jit_step, is_scheduled=true

fused {
  x = f32[8,8] parameter(0)
  zero = f32[] constant(0), metadata={op_name="jit(step)/while/body"}
  pad = f32[8,8] broadcast(zero), dimensions={}
  ROOT dot.1 = f32[8,8] dot(x, pad), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="NAME"}
}

ENTRY main {
  x.1 = f32[8,8] parameter(0)
  ROOT fusion.1 = f32[8,8] fusion(x.1), kind=kCustom, calls=fused
}
"""


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("jit(step)/strand_alpha/while/body/transpose(jvp())/dot_general", "alpha"),
        ("jit(step)/strand_beta/while/body/jvp()/dot_general", "beta"),
        ("jit(step)/while/body/transpose(jvp(layer))/dot_general", "backward"),
        ("jit(step)/while/body/jvp(layer)/dot_general", "forward"),
        ("jit(step)/optimizer/transpose(dot)/dot_general", "other"),
    ],
)
def test_a_fusion_without_a_name_is_what_it_fuses(name: str, part: str) -> None:
    fusion = HloModule.from_text(FUSION.replace("NAME", name)).entry.root
    assert instruction_words.part_of(fusion) == part
    assert instruction_words.describe(fusion) == "GEMM"


def test_the_largest_module_of_a_folder_and_says_which(dump: Dump, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dump()
    small = "HloModule jit_init, is_scheduled=true\n\nENTRY main {\n  ROOT x = f32[] parameter(0)\n}\n"
    dump(text=small, name="module_0009.jit_init.sm_9.0a_gpu_after_optimizations")
    assert dhelix_inspect(folder) == 0
    assert f"{NAME}.hlo.pb is the largest module of {folder}" in " ".join(capsys.readouterr().out.split())


def test_tables(dump: Dump, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_inspect(dump() / f"{NAME}.txt", "--hardware=A40") == 0  # there is no profile of this GPU
    text = capsys.readouterr().out
    assert "estimates from the roofline cost model for A40" in text
    for word in ("all-gather-start.1", "all-reduce.1", "GEMM", "copy.1", "exposed", "memory: peak"):
        assert word in text


def test_units_suit_a_small_step(dump: Dump, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that takes microseconds and kilobytes is shown in these units, not as zeros."""
    small = dump(text=TEXT.replace("4096", "64").replace("1024", "16"))
    assert dhelix_inspect(small) == 0
    cells = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = {row[0].strip(): row[1].strip() for row in cells if len(row) > 1}
    assert rows["step"].endswith(" µs") and float(rows["step"].split()[0]) > 10
    assert rows["memory: peak"] == "8.3 KiB"
    assert rows["memory: arguments"] == "1.0 KiB"
    assert rows["memory: temporaries"] == "6.8 KiB"
    assert rows["memory: in the host's memory"] == "0 B"


def test_json(dump: Dump, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_inspect(dump(), "--json") == 0
    found = json.loads(capsys.readouterr().out)["inspection"]
    assert found["estimated"] is True
    assert found["memory"]["peak"] == 8530
    assert [c["instruction"] for c in found["collectives"]] == ["all-reduce.1", "all-gather-start.1"]


def test_compare(dump: Dump, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = dump()
    after = dump("after", TEXT.replace("copy.1 = ", "copied = ").replace("(copy.1)", "(dot.1)"))
    png, trace = tmp_path / "timeline.png", tmp_path / "timeline.pftrace"
    options = ("--compare", after, "--titles=plain,two strands", "--png", png, "--perfetto", trace)
    assert dhelix_inspect(before, *options) == 0
    text = capsys.readouterr().out
    assert "plain" in text and "two strands" in text and "after / before" in text
    assert png.read_bytes().startswith(b"\x89PNG")
    assert trace.stat().st_size > 0
    assert dhelix_inspect(before, "--compare", after, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"before", "after", "gain"} and data["gain"]["warning"] is None
    assert sum(data["gain"]["causes_ms"].values()) == pytest.approx(
        data["after"]["step_ms"] - data["before"]["step_ms"]
    )


def test_compare_matches_collectives_and_says_what_is_unfair(dump: Dump, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_inspect(dump(), "--compare", dump("after")) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Collectives of both dumps, largest gain first" in text and "compared with the first dump" in text
    assert "Not a fair comparison" not in text
    found = inspect.inspect_dump(dump())
    twice = dataclasses.replace(found, parts=dataclasses.replace(found.parts, flops=2 * found.parts.flops))
    print_tables([found, twice], console=Console(file=(output := io.StringIO()), width=144))
    assert "Not a fair comparison: the second step computes 2.00 x as much" in " ".join(output.getvalue().split())


def test_brackets_in_names_are_no_markup(dump: Dump, capsys: pytest.CaptureFixture[str]) -> None:
    after = dump("after [bold]")
    assert dhelix_inspect(dump("step [red]"), "--compare", after, "--titles=[tp],[/]") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "step [red]" in text and "after [bold]" in text and "of [tp], most" in text and "of [/], most" in text


def test_no_ratio_to_what_rounds_to_nothing(dump: Dump) -> None:
    """Times are sums, so rounding may turn a time of zero into 1e-17. A ratio to it means nothing."""
    found = inspect.inspect_dump(dump())
    before, after = (dataclasses.replace(found, slow_down_ms=loss) for loss in (1e-17, 0.5))
    output = io.StringIO()
    print_tables([before, after], console=Console(file=output, width=144))
    lines = output.getvalue().splitlines()
    lost, *_ = (line for line in lines if "slow-down by overlapping" in line)
    assert "0.500 ms" in lost and " x " not in lost
    assert any("1.00 x" in line for line in lines if "step" in line)


def test_times_of_a_profile(dump: Dump, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Times come from a profile of the hardware, link and launch setting, or else from the roofline.

    A profile that the user names must be readable.
    """
    monkeypatch.delenv("DHELIX_PROFILES", raising=False)
    found = inspect.inspect_dump(dump(), "H200", profile="auto", setting="connections1")
    assert found.cost_model.startswith("profile h200-nvlink (launch setting connections1, ")
    assert found.step_ms > found.compute_ms > 0.0 and len(found.collectives) == 2
    assert found.idle_ms > 0.0  # in a measured step, kernels have pauses between them
    assert found.step_ms == pytest.approx(found.compute_ms + found.exposed_ms + found.idle_ms)
    assert inspect.inspect_dump(dump(), "H200-no-p2p", profile="auto").cost_model.startswith("profile h200-no-p2p (")
    assert inspect.inspect_dump(dump(), "A40", profile="auto").cost_model == "roofline"
    assert inspect.inspect_dump(dump(), "H200").cost_model == "roofline"
    assert dhelix_inspect(dump(), "--hardware=H200") == 0
    assert "estimates from the profile h200-nvlink" in " ".join(capsys.readouterr().out.split())
    assert dhelix_inspect(dump(), "--profile", "missing.json") == 1
    assert "missing.json: cannot be read" in capsys.readouterr().err


def test_a_compiled_step() -> None:
    x = jnp.ones((64, 64))
    compiled = jax.jit(lambda a, b: (a + b, b @ b), donate_argnums=0).lower(x, x).compile()
    found = inspect.inspect_compiled(compiled, title="small step")
    assert picture.of(found).title == "small step"
    assert found.collectives == () and found.hidden_share == 1.0
    assert found.hardware == "H200" and found.notes == (
        "compiled for cpu, which dhelix does not know: times are for an H200",
    )
    assert inspect.inspect_compiled(compiled, "A40").notes == ()
    assert found.memory is not None
    assert (found.memory.arguments, found.memory.aliased) == (2 * 64 * 64 * 4, 64 * 64 * 4)


def test_a_dump_of_this_jax(tmp_path: Path) -> None:
    """Reads back a dump of the installed XLA: file names, buffer assignment, memory."""
    code = "import jax; jax.jit(lambda a: a @ a).lower(jax.numpy.ones((64, 64))).compile()"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    found = inspect.inspect_dump(tmp_path)
    assert found.memory is not None and found.memory.arguments == 64 * 64 * 4
    assert any("compiled for CPU" in note for note in found.notes)
    assert not picture.of(found).overlaps and "nothing overlaps" in picture.of(found).summary


def _binary(path: Path) -> None:
    path.write_bytes(b"\x7fELF\x00\xff\xfe")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("x.txt", lambda p: p.write_text("To whom it may concern"), "holds no HLO module"),
        (
            "x.txt",
            lambda p: p.write_text(TEXT[: len(TEXT) // 2]),
            "is cut short: the text ends in line 29, inside the module; dump or copy it again",
        ),
        (
            "x.txt",
            lambda p: p.write_text(TEXT.replace("async-start", "async-take-off")),
            "give *after_optimizations.hlo.pb, which every version reads (XLA: expects opcode but sees: async-take-off",
        ),
        ("x.txt", _binary, "holds no HLO module (not a serialized HloModuleProto"),
        ("x.hlo.pb", _binary, "dump again with --xla_dump_to"),
        ("x.hlo.pb", lambda p: p.write_bytes(HloModule.from_text(TEXT).to_bytes()[:-100]), "cut short"),
        ("x.txt", lambda p: p.write_text(TEXT.replace("=true", "=false")), "is not scheduled"),
    ],
)
def test_bad_dumps(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    damage(tmp_path / name)
    assert dhelix_inspect(tmp_path / name, "--png", tmp_path / "p.png") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert message in shown.err
    assert not (tmp_path / "p.png").exists()


def test_an_unscheduled_module_names_the_file_to_give(dump: Dump) -> None:
    with pytest.raises(DhelixError, match=f"not scheduled.*give {NAME}.hlo.pb in the same folder"):
        dumps.read(dump() / "module_0001.jit_step.before_optimizations.txt")


def test_folders_without_a_scheduled_module(tmp_path: Path) -> None:
    with pytest.raises(DhelixError, match="holds no HLO dump; compile the step with XLA_FLAGS="):
        inspect.inspect_dump(tmp_path)
    (tmp_path / "module_0001.jit_step.before_optimizations.txt").write_text(TEXT)
    with pytest.raises(DhelixError, match=r"before_optimizations.txt but no \*after_optimizations\* file"):
        inspect.inspect_dump(tmp_path)
    with pytest.raises(DhelixError, match="no such file or folder"):
        inspect.inspect_dump(tmp_path / "missing")


def test_wrong_arguments(dump: Dump, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_inspect() == 1
    assert "give one dump to inspect" in capsys.readouterr().err
    assert dhelix_inspect(dump(), "--hardware=B9000") == 2
    assert "H200" in capsys.readouterr().err
    assert dhelix_inspect(dump(), "--titles=before,after") == 1
    assert "--titles has 2 titles for 1 dump" in capsys.readouterr().err
    assert dhelix_inspect(dump(), "--headline=Mine") == 1
    assert "--headline is printed in the picture; add --png FILE" in capsys.readouterr().err
    with pytest.raises(DhelixError, match="hardware 'B9000' is unknown"):
        inspect.inspect_dump(dump(), "B9000")
