"""Heat maps of hand-made pairs."""

import builtins
from dataclasses import replace
from pathlib import Path

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.shown import heat_map
from dhelix.launch.shown.heat_map import HeatMap
from dhelix.profiles.keys import CollectiveKey, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Provenance, Section, Timing

SHORT = OperatorKey("gemm", "bf16,bf16->bf16:nt:cublaslt", (8192, 1024, 4096))
LONG = OperatorKey("gemm", "bf16,bf16->bf16:nt:cublaslt", (8192, 4096, 4096))
ATTENTION = OperatorKey("attention", "bf16:causal", (1, 8, 8192, 8192, 128))
FUSION = OperatorKey("fusion", "loop:12ab", (8192, 4096))
GATHER = CollectiveKey("all-gather", 64 * 2**20, 4)
REDUCE = CollectiveKey("reduce-scatter", 64 * 2**20, 4)
SOLO = {SHORT: Timing(1e-4), LONG: Timing(4e-4), ATTENTION: Timing(5e-4), FUSION: Timing(5e-5)}
SECTION = Section(
    "connections1",
    SOLO,
    {GATHER: Timing(2e-4), REDUCE: Timing(2e-4)},
    {
        PairKey(LONG, GATHER): PairTiming(4e-4, 4e-4, 3e-4, 4e-4, 2e-4),
        PairKey(GATHER, LONG): PairTiming(5e-4, 3e-4, 5e-4, 2e-4, 4e-4),
        PairKey(SHORT, GATHER): PairTiming(3.5e-4, 2e-4, 3.5e-4, 1e-4, 2e-4),
        PairKey(ATTENTION, SHORT): PairTiming(6e-4, 5e-4, 6e-4, 5e-4, 1e-4),  # no collective: not in the map
        PairKey(GATHER, REDUCE): PairTiming(4e-4, 2e-4, 4e-4, 2e-4, 2e-4),
    },
    failures={f"{SHORT} + {REDUCE}": "out of memory"},
)
PROFILE = Profile("H200", "nvlink", (Provenance("NVIDIA H200", 4),), {"connections1": SECTION})


def test_rows_columns_and_cells_per_launch_order() -> None:
    drawn = heat_map.heat_map(PROFILE, "connections1")
    assert drawn.rows == ("GEMM nt 8192x4096x4096, 400 µs", "GEMM nt 8192x1024x4096, 100 µs")
    assert drawn.columns == ("all-gather 64 MiB\n4 GPUs\n200 µs", "reduce-scatter 64 MiB\n4 GPUs\n200 µs")
    compute_first, collective_first = drawn.panels
    assert compute_first[0] == (pytest.approx(1.0), None)
    assert compute_first[1] == (pytest.approx(-0.5), None)
    assert collective_first == ((pytest.approx(0.5), None), (None, None))
    assert drawn.failed == {(0, 1, 1)}


def test_the_title_says_hardware_link_and_setting() -> None:
    title = heat_map.heat_map(PROFILE, "connections1").title
    for word in ("4 x H200", "NVLink", "connections1"):
        assert word in title


def test_only_what_is_wanted() -> None:
    drawn = heat_map.heat_map(PROFILE, "connections1", {LONG, GATHER}.__contains__)
    assert len(drawn.rows) == len(drawn.columns) == 1


def test_cells_whose_repeats_scatter_are_marked() -> None:
    scattered = PairTiming(4e-4, 4e-4, 3e-4, 4e-4, 2e-4, spread=0.06e-3)
    assert not scattered.steady and replace(scattered, spread=0.05e-3).steady
    section = replace(SECTION, pairs={**SECTION.pairs, PairKey(LONG, GATHER): scattered})
    drawn = heat_map.heat_map(replace(PROFILE, sections={"connections1": section}), "connections1")
    assert drawn.unsteady == {(0, 0, 0)}
    assert drawn.panels[0][0][0] == pytest.approx(1.0)


def test_operators_that_read_alike_are_told_apart() -> None:
    wider = OperatorKey("gemm", "f32,f32->f32:nt:cublaslt", LONG.sizes)
    pairs = {**SECTION.pairs, PairKey(wider, GATHER): PairTiming(5e-4, 4e-4, 5e-4, 3e-4, 2e-4)}
    section = Section("default", {**SOLO, wider: Timing(3e-4)}, SECTION.collectives, pairs)
    rows = heat_map.heat_map(Profile("H200", "nvlink", (), {"default": section}), "default").rows
    assert len(set(rows)) == 3


def test_nothing_to_draw() -> None:
    with pytest.raises(DhelixError, match="measured under 'default'.*--pairs"):
        heat_map.heat_map(PROFILE, "default")


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (14, 4), pytest.param(40, 10, marks=pytest.mark.slow)])
def test_the_picture_is_as_large_as_it_must_be_and_the_same_each_time(tmp_path: Path, rows: int, columns: int) -> None:
    cells = tuple(tuple(r / rows - c / columns for c in range(columns)) for r in range(rows))
    names = tuple(f"reduce-scatter {c} MiB\n4 GPUs" for c in range(columns))
    drawn = HeatMap("Pairs", tuple(f"GEMM {r}x4096x4096" for r in range(rows)), names, (cells, cells))
    for name in ("1.png", "2.png")[: 2 if rows < 40 else 1]:
        heat_map.save_png(drawn, tmp_path / name)
    data = (tmp_path / "1.png").read_bytes()
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert data.startswith(b"\x89PNG")
    assert height >= rows * 30 and width >= 2 * columns * 60  # room for a number in each cell
    if rows < 40:
        assert data == (tmp_path / "2.png").read_bytes()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DhelixError, match="cannot write"):
        heat_map.save_png(heat_map.heat_map(PROFILE, "connections1"), tmp_path / "none" / "p.png")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: object, **keywords: object) -> object:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DhelixError, match=r"pip install 'dhelix\[plot\]'"):
        heat_map.save_png(heat_map.heat_map(PROFILE, "connections1"), tmp_path / "p.png")


def test_more_than_hidden_whole_is_noise_without_a_second_measurement() -> None:
    quick = replace(SECTION.pairs[PairKey(LONG, GATHER)], seconds=3.5e-4)
    section = replace(SECTION, pairs={**SECTION.pairs, PairKey(LONG, GATHER): quick})
    drawn = heat_map.heat_map(replace(PROFILE, sections={"connections1": section}), "connections1")
    assert drawn.panels[0][0][0] == 1.0 and drawn.noise == {(0, 0, 0)}
