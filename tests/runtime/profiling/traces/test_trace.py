"""Overlap from profiler traces, which are written by hand in the profiler's own text format."""

import random
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from dhelix.errors import DhelixError
from dhelix.passes.hlo import HloModule
from dhelix.runtime.profiling.traces import trace

MODULE = """
HloModule jit_step, is_scheduled=true

wrapped {
  p = f32[4] parameter(0)
  ROOT gather = f32[8] all-gather(p), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}

ENTRY main {
  x = f32[4] parameter(0)
  loss-start = ((f32[4]), f32[8]) async-start(x), calls=wrapped
  all-reduce-like = f32[4] add(x, x)
  loss-done = f32[8] async-done(loss-start)
  ROOT result = (f32[8], f32[4]) tuple(loss-done, all-reduce-like)
}
"""


Kernel = tuple[str, str, float, float, dict[str, str]]


def profile(*kernels: Kernel, device: str = "/device:GPU:0") -> trace.Profile:
    """A trace; kernels are (stream, kernel name, start in ms, end in ms, stats)."""
    names = sorted({name for _, name, *_ in kernels} | {key for *_, stats in kernels for key in stats})
    ids = {name: number for number, name in enumerate(names, 1)}
    lines = []
    for number, stream in enumerate(sorted({k[0] for k in kernels}), 1):
        events = []
        for _, name, start, end, stats in (k for k in kernels if k[0] == stream):
            text = "".join(f'stats {{ metadata_id: {ids[k]} str_value: "{v}" }}' for k, v in stats.items())
            offset, duration = round(start * 1e9), round((end - start) * 1e9)  # picoseconds
            events.append(f"events {{ metadata_id: {ids[name]} offset_ps: {offset} duration_ps: {duration} {text} }}")
        lines.append(f'lines {{ id: {number} name: "{stream}" {" ".join(events)} }}')
    kinds = "".join(
        f'{kind} {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for kind in ("event_metadata", "stat_metadata")
        for name, i in ids.items()
    )
    text = f'planes {{ id: 1 name: "{device}" {" ".join(lines)} {kinds} }}'
    return ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))


def op(name: str, module: str = "jit_step") -> dict[str, str]:
    return {"hlo_op": name, "hlo_module": module}


def test_hidden_is_what_lies_under_compute_on_any_stream() -> None:
    report = trace.analyse(
        profile(
            ("Stream #1", "gemm", 0, 4, op("dot.1")),
            ("Stream #2", "fusion", 3, 6, op("fusion.2")),
            ("Stream #3", "nccl", 2, 10, op("all-gather-start.1")),
        )
    )
    assert report.compute_ms == pytest.approx(6)
    assert report.communication_ms == pytest.approx(8)
    assert report.hidden_ms == pytest.approx(4)
    assert report.exposed_ms == pytest.approx(4)
    assert report.hidden_share == pytest.approx(0.5)
    assert report.span_ms == pytest.approx(10)
    assert report.unnamed_ms == 0
    assert [(s.name, s.compute_ms, s.communication_ms) for s in report.streams] == [
        ("Stream #1", pytest.approx(4), 0),
        ("Stream #2", pytest.approx(3), 0),
        ("Stream #3", 0, pytest.approx(8)),
    ]
    assert report.collectives == (
        trace.CollectiveTime("all-gather-start.1", 1, pytest.approx(8), pytest.approx(4)),  # type: ignore[arg-type]
    )


def test_the_instruction_decides_and_not_the_kernel() -> None:
    """A copy-engine all-gather is a memcpy, and the kernel of a GEMM may have any name."""
    report = trace.analyse(
        profile(
            ("Stream #1", "nccl_lookalike_gemm", 0, 2, op("custom-call.7")),
            ("Stream #2", "MemcpyP2P", 0, 1, op("all_gather.38.2")),
        )
    )
    assert (report.compute_ms, report.communication_ms) == (pytest.approx(2), pytest.approx(1))


def test_with_the_module_opcodes_decide_and_not_names() -> None:
    kernels = profile(
        ("Stream #1", "k", 0, 2, op("all-reduce-like")),
        ("Stream #2", "k", 1, 3, op("loss-start")),
        ("Stream #1", "k", 5, 6, op("all-gather.1", "jit_other")),
    )
    report = trace.analyse(kernels, module=HloModule.from_text(MODULE))
    assert (report.compute_ms, report.communication_ms) == (pytest.approx(2), pytest.approx(2))
    assert report.hidden_ms == pytest.approx(1)
    assert [c.instruction for c in report.collectives] == ["loss-start"]


def test_kernels_of_command_buffers_are_told_apart_by_name_and_the_report_says_so() -> None:
    report = trace.analyse(
        profile(
            ("Stream #1", "ncclDevKernel_AllGather_RING_LL", 0, 2, op("command_buffer_3")),
            ("Stream #1", "nvjet_hsh", 1, 2, op("command_buffer_3")),
            ("Stream #2", "ncclDevKernel_ReduceScatter", 2, 3, {}),
        )
    )
    assert report.communication_ms == report.unnamed_ms == pytest.approx(3)
    assert report.hidden_ms == pytest.approx(1)


def test_copies_that_name_no_instruction_are_what_nccl_gives_to_copy_engines() -> None:
    """XLA's own copies name their instruction and count as compute. Copies from and to the host are not NCCL's."""
    report = trace.analyse(
        profile(
            ("Stream #1", "gemm", 0, 4, op("dot.1")),
            ("Stream #2", "MemcpyP2P", 1, 3, {}),
            ("Stream #2", "MemcpyD2D", 3, 5, {}),
            ("Stream #3", "MemcpyD2D", 8, 9, op("copy.1")),
            ("Stream #3", "MemcpyH2D", 10, 12, {}),
            ("Stream #4", "MemcpyD2H", 12, 13, {}),
        )
    )
    assert report.communication_ms == report.copy_engine_ms == report.unnamed_ms == pytest.approx(4)
    assert report.hidden_ms == pytest.approx(3)
    assert report.compute_ms == pytest.approx(8)
    assert report.copies_ms == pytest.approx(4)
    assert report.idle_ms == pytest.approx(4)


def test_copies_of_a_graph_are_communication_if_they_leave_the_gpu() -> None:
    in_graph = {"hlo_op": "command_buffer_1"}
    kernels = profile(("Stream #1", "MemcpyD2D", 0, 2, in_graph), ("Stream #1", "MemcpyP2P", 2, 3, in_graph))
    report = trace.analyse(kernels)
    assert (report.compute_ms, report.communication_ms) == (pytest.approx(2), pytest.approx(1))


def test_nested_annotations_name_the_innermost_instruction() -> None:
    report = trace.analyse(profile(("Stream #1", "k", 0, 1, op("while.1::reduce-scatter.2"))))
    assert [c.instruction for c in report.collectives] == ["reduce-scatter.2"]
    assert report.hidden_ms == 0


def test_no_communication_is_all_hidden() -> None:
    assert trace.analyse(profile(("Stream #1", "k", 0, 1, op("dot.1")))).hidden_share == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "/device:GPU:3"}, "no GPU /device:GPU:3; it has /device:GPU:0"),
        ({"module_name": "jit_step"}, "no kernels of module jit_step"),
    ],
)
def test_what_the_trace_does_not_hold(arguments: dict[str, str], message: str) -> None:
    kernels = profile(("Stream #1", "k", 0, 1, op("dot.1", "jit_init")))
    with pytest.raises(DhelixError, match=message):
        trace.analyse(kernels, **arguments)  # type: ignore[arg-type]


def test_a_trace_without_gpus() -> None:
    with pytest.raises(DhelixError, match="record it on GPUs"):
        trace.analyse(profile(("x", "k", 0, 1, {}), device="/host:CPU"))


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DhelixError, match="record one with jax.profiler.trace"):
        trace.load(tmp_path)
    with pytest.raises(DhelixError, match="no trace at"):
        trace.load(tmp_path / "missing.pb")
    broken = tmp_path / "a.xplane.pb"
    broken.write_bytes(b"\xff\xff not a trace")
    with pytest.raises(DhelixError, match="is not a profiler trace"):
        trace.load(broken)


def test_the_newest_trace_of_a_folder(tmp_path: Path) -> None:
    text = 'planes { id: 1 name: "/device:GPU:7" }'
    folder = tmp_path / "plugins" / "profile" / "2026"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    assert trace.devices(trace.load(tmp_path)) == ["/device:GPU:7"]


def test_overlap_against_counting() -> None:
    source = random.Random(0)
    for _ in range(50):
        a, b = ([(start, start + source.randint(0, 4)) for start in source.sample(range(30), 8)] for _ in range(2))
        ticks_a, ticks_b = ({t for s, e in spans for t in range(s, e)} for spans in (a, b))
        assert trace.length(trace.merge(a)) == len(ticks_a)
        assert trace.overlap(trace.merge(a), trace.merge(b)) == len(ticks_a & ticks_b)
