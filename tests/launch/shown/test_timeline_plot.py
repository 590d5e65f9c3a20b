"""Pictures of hand-made timelines."""

import builtins
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.launch.shown import timeline_plot
from dhelix.launch.shown.timeline_plot import Bar, Picture, Window

BARS = (
    Bar(0, 4, "compute", "alpha", "GEMM", "dot.1"),
    Bar(4, 5, "compute", "copy", "copy", "copy.1"),
    Bar(7, 9, "compute", "beta", "attention", "fmha.1"),
    Bar(3, 6, "communication", "beta", "all-gather", "all-gather-start.1", "AG"),
    Bar(8, 10, "communication between nodes", "alpha", "all-reduce", "all-reduce.1", "AR"),
)
PICTURE = Picture("A step", "10 ms", BARS, (Window(0, 5, "first half"), Window(5, 10, "second half")))


def test_lanes_compute_first() -> None:
    assert PICTURE.lanes == ["compute", "communication", "communication between nodes"]
    assert PICTURE.end == 10


def test_communication_is_cut_into_hidden_and_exposed() -> None:
    assert timeline_plot.pieces(PICTURE, "communication") == {"hidden": [(3, 5)], "exposed": [(5, 6)]}
    assert timeline_plot.pieces(PICTURE, "communication between nodes") == {
        "hidden": [(8, 9)],
        "exposed": [(9, 10)],
    }
    assert timeline_plot.pieces(PICTURE, "compute") == {
        "alpha": [(0, 4)],
        "beta": [(7, 9)],
        "copy": [(4, 5)],
    }


def test_where_nothing_can_overlap_communication_is_not_exposed() -> None:
    on_cpu = dataclasses.replace(PICTURE, overlaps=False)
    assert timeline_plot.pieces(on_cpu, "communication") == {"communication": [(3, 6)]}


@pytest.mark.parametrize(
    ("a", "b", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 3), (5, 6)], [(0, 2), (3, 5), (6, 10)]),
        ([(0, 2), (4, 6)], [(1, 5)], [(0, 1), (5, 6)]),
        ([(0, 1), (9, 10)], [(2, 3), (4, 5)], [(0, 1), (9, 10)]),
    ],
)
def test_subtract(a: list, b: list, left: list) -> None:
    assert timeline_plot.subtract(a, b) == left


def test_shares_add_up_to_the_time() -> None:
    edges = np.linspace(0, 10, 8)
    shares = timeline_plot._shares([(0.5, 2.0), (2.0, 2.5), (9.0, 10.0)], edges)
    assert shares.min() >= 0 and shares.max() <= 1 + 1e-9
    assert float(shares @ np.diff(edges)) == pytest.approx(3.0)


def test_png_is_1200_pixels_wide_twice_over_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "1.png", tmp_path / "2.png"
    for path in (first, second):
        timeline_plot.save_png([PICTURE, PICTURE], path, headline="Before and after", footnote="by hand")
    assert int.from_bytes(first.read_bytes()[16:20]) == 2400
    assert first.read_bytes() == second.read_bytes()


def test_perfetto_names_lanes_and_operators(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    timeline_plot.save_perfetto([PICTURE], path)
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    trace = Trace.FromString(path.read_bytes())
    threads = [p.track_descriptor.thread.thread_name for p in trace.packet if p.HasField("track_descriptor")]
    assert threads == PICTURE.lanes
    named = [(p.timestamp, p.track_event.name) for p in trace.packet if p.track_event.name]
    assert (3_000_000, "all-gather all-gather-start.1") in named
    assert len(named) == len(BARS)


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(DhelixError, match="nothing to draw"):
        timeline_plot.save_png([Picture("empty", "", ())], tmp_path / "p.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("package", "save"), [("matplotlib", "save_png"), ("perfetto", "save_perfetto")])
def test_a_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, save: str
) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: object, **keywords: object) -> object:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return original(name, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DhelixError, match=r"pip install 'dhelix\[plot\]'"):
        getattr(timeline_plot, save)([PICTURE], tmp_path / "out")
