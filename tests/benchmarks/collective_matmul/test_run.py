"""The benchmark of collective matmuls: sites, timed loops, results, tables, and one call on 4 CPU devices."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh

from dhelix.benchmarks.collective_matmul import programs as collective_matmul_programs
from dhelix.benchmarks.collective_matmul import run as collective_matmul
from dhelix.benchmarks.collective_matmul.programs import AXIS, Program, lowered, operand_shapes, programs
from dhelix.benchmarks.collective_matmul.results import COLLECTIVE, GEMM, Measured, Results
from dhelix.benchmarks.collective_matmul.sites import sites
from dhelix.benchmarks.collective_matmul.tables import DISTFUSE, groups, merged, ship, tables
from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul import times as collective_matmul_times
from dhelix.profiles.collective_matmul.sites import KINDS, MONOLITHIC, Form, Site, Tiles, choose
from dhelix.profiles.profile import Provenance
from dhelix.runtime.compiler import deviceless

GATHER, SCATTER, REDUCE = KINDS
ON = Provenance("NVIDIA H200", 4, "2026-01-31", nccl="2.28.9", jax="0.11.2", machine="9f3a")
LARGE, SMALL = Tiles(128, 256, 64, 4, "N", 8, 132), Tiles(64, 128, 64, 6, "M", 4)
MOSAIC = Form("mosaic", tiles=LARGE).key
QKV = Site(GATHER, 8192, 4096, 1536, "bfloat16", 4)
OUT_70B = Site(REDUCE, 1024, 2048, 8192, "bfloat16", 4)


def arguments(*flags: str) -> Any:
    return collective_matmul.parser().parse_args(flags)


def test_sites_are_the_layers_of_llama_and_the_shapes_of_distfuse() -> None:
    found = sites(4)
    assert found[:2] == [("llama-70b out", OUT_70B), ("llama-70b down", dataclasses.replace(OUT_70B, contraction=7168))]
    assert found[2] == ("llama-8b qkv", QKV)
    assert {s.contraction * 4 for _, s in found[:2]} == set(DISTFUSE)
    assert len(found) == len({s for _, s in found}) == 2 + (8 + 8 + 4) * 4
    assert {s.rows for _, s in found[2:10]} == {8192}
    by_name = {(name, s.kind): s.sizes[1:] for name, s in found}
    assert by_name["llama-8b gate up", GATHER] == by_name["llama-8b gate up'", SCATTER][::-1] == (4096, 7168)
    assert by_name["llama-8b out'", GATHER] == by_name["llama-8b out", SCATTER][::-1] == (4096, 1024)


def test_sites_can_be_chosen() -> None:
    assert (
        sites(2, "float16", [SCATTER], ["8b down"], [64])
        == [
            ("llama-8b down", Site(SCATTER, 64, 7168, 4096, "float16", 2)),
            ("llama-8b down'", Site(SCATTER, 64, 4096, 7168, "float16", 2)),
        ][:1]
    )
    assert [s.key for _, s in sites(2, kinds=[GATHER], wanted=["8x4x6"])] == [f"{GATHER} bfloat16 8x4x6 over 2"]
    with pytest.raises(DhelixError, match="is named llama-9b: give parts of llama-8b qkv, "):
        sites(4, wanted=["llama-9b"])


def test_iterations_of_a_loop_neither_merge_nor_leave_it() -> None:
    mesh = Mesh(jax.devices()[:2], (AXIS,))
    site = Site(GATHER, 8, 4, 6, "float32", 2)
    seen: list[None] = []

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: seen.append(None))
        return jnp.dot(lax.all_gather(x, AXIS, tiled=True), w)

    program = Program("counted", ("x", "w"), (8, 6), call)
    made = collective_matmul_programs.operands(site, mesh)
    start = collective_matmul_programs.arguments(program, site, mesh, made)
    out = lowered(program, site, mesh, 5).compile()(*start)
    jax.effects_barrier()
    assert len(seen) == 5 * 2  # five iterations on each of two devices
    expected = collective_matmul_programs.reference(site, mesh, made["x"], made["w"])
    assert collective_matmul_programs.difference(expected, out) < 1e-5


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", KINDS)
def test_on_gpus_a_loop_holds_the_operation_and_copies_nothing(kind: str) -> None:
    site, mesh = dataclasses.replace(QKV, kind=kind), deviceless.mesh({AXIS: 4})
    collective = {GATHER: " all-gather", SCATTER: " reduce-scatter", REDUCE: " all-reduce"}[kind]
    for program in programs(site, [MONOLITHIC]):
        text = deviceless.compile(lowered(program, site, mesh, 20)).as_text() or ""
        body = text[text.index("%region_0") :].split("\n}")[0]
        assert (collective in body) == (program.name != GEMM)
        assert ('custom_call_target="__cublas$lt$matmul"' in body) == (program.name != COLLECTIVE)
        assert " copy(" not in body and text.count(" copy(") <= 1  # only the loop's counter is copied
        assert '"known_trip_count":{"n":"20"}' in text


def test_operands_are_those_of_one_device() -> None:
    assert operand_shapes(QKV) == {"x": (2048, 4096), "w": (4096, 1536), "gathered": (8192, 4096)}
    assert operand_shapes(OUT_70B) == {"x": (1024, 2048), "w": (2048, 8192), "partial": (1024, 8192)}
    results = {p.name: p.result for p in programs(dataclasses.replace(QKV, kind=SCATTER), [MONOLITHIC])}
    assert results == {GEMM: (8192, 1536), COLLECTIVE: (2048, 1536), "monolithic": (2048, 1536)}


def test_tiles_are_tuned_at_some_sites_and_taken_over_at_others() -> None:
    def tiles(flags: tuple[str, ...], site: Site, link: str = "nvlink", name: str = "qkv") -> list[Tiles | None]:
        found = collective_matmul._forms(arguments("--forms", "mosaic", *flags), name, site, link, known)
        assert found[0] == MONOLITHIC
        return [form.tiles for form in found[1:]]

    other, third = Tiles(128, 128, 64, 4, "M", 8), dataclasses.replace(QKV, rows=2048)
    us = {Form("mosaic", tiles=t).key: [us] for t, us in ((LARGE, 9.0), (SMALL, 7.0), (other, 8.0))}
    known = {QKV: Measured("qkv", 4, us), third: Measured("qkv", 4, {MOSAIC: [5.0]})}
    near = dataclasses.replace(QKV, rows=16384)
    assert set(tiles(("--tune", "4096,16384"), near)) == set(collective_matmul.CANDIDATES[QKV.kind])
    assert tiles(("--tune", "16384", "--tiles", SMALL.key), near) == [SMALL]
    assert set(tiles((), near)) == set(tiles(("--tune", "16384"), near, name="qkv'")) == {SMALL, other}
    assert tiles((), dataclasses.replace(near, kind=SCATTER)) == [None]
    assert tiles((), near, "no-p2p") == []


def measured(name: str = "llama-8b qkv", **us: float) -> Measured:
    values = {"bidirectional_ring": 320.0, **us}
    rounds = {key.replace("hybrid_", "hybrid:"): [value - 1, value, value + 1] for key, value in values.items()}
    return Measured(name, 20, rounds, {key: 0.004 for key in rounds if key not in (GEMM, COLLECTIVE)})


def results(**sites: Measured) -> Results:
    return Results(ON, "nvlink", 4, sites={Site.parse(key): found for key, found in sites.items()})


QKV_MEASURED = measured(gemm=160, collective=170, monolithic=340, ring=330, hybrid_4=250)
OUT_MEASURED = measured("llama-70b out", gemm=60, collective=90, monolithic=150, ring=160, hybrid_4=120)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    written = results(**{QKV.key: QKV_MEASURED})
    written.sites[QKV].failed["ring"] = "DhelixError: why"
    written.write(tmp_path / "r.json")
    assert Results.read(tmp_path / "r.json") == written
    assert '"ring": [329, 330, 331]' in (tmp_path / "r.json").read_text()
    (tmp_path / "other.json").write_text('{"sites": []}')
    with pytest.raises(DhelixError, match="holds no results of benchmarks/collective_matmul/run.py; leave it out"):
        Results.read(tmp_path / "other.json")


def test_what_all_programs_of_a_round_have_in_common_is_no_spread_of_theirs() -> None:
    warm = [1.0, 1.02, 1.05, 1.08, 1.1, 1.15]
    us = {GEMM: [100 * w for w in warm], COLLECTIVE: [60.0] * 6, MONOLITHIC.key: [160 * w for w in warm]}
    times = Measured(
        "out", 9, {**us, "ring": [170 * w for w in warm], "mosaic": [120.0, 118.0], "hybrid:2": []}
    ).times()
    assert times is not None
    plain = times.forms[MONOLITHIC]
    assert plain.spread < 1e-9 < times.collective.spread
    assert times.forms[Form("ring")].seconds / plain.seconds == pytest.approx(170 / 160)
    assert {form.name for form in times.forms} == {"monolithic", "ring", "mosaic"}


def test_tables_have_shares_goals_and_the_papers_numbers() -> None:
    QKV_MEASURED.failed[MOSAIC] = "DhelixError: no kernel"
    text = tables([results(**{QKV.key: QKV_MEASURED, OUT_70B.key: OUT_MEASURED})])
    assert "**NVIDIA H200, axis of 4, nvlink, setting default; medians of 3 rounds** (machine 9f3a, jax 0.11.2" in text
    assert (
        "`all_gather_matmul`: share of the chosen form, median 0.680, least 0.680; of the monolithic form 0.5" in text
    )
    assert "(must be 0.87, should be 0.93 on 4 H200s over NVLink)" in text
    row = (
        "| llama-8b qkv | 8192 | 4096 | 1536 | 4 | 160 | 170 | 0.50 | 0.52 | 0.53 | 0.68 |  | hybrid, 4 chunks | 1.36 |"
    )
    assert row in text.splitlines()
    paper = "| 8192 | 60.0 | 90.0 | 150.0 | 120.0 | hybrid | 1.25 | 166.0, 221.0, 387.0 | 333.8 | 1.16 |"
    assert paper in text.splitlines()
    assert "differ from float32 by at most 0.0040" in text
    assert f"- mosaic, 1 times, such as {MOSAIC} at {QKV.key}: DhelixError: no kernel" in text


def test_shipped_times_are_of_all_files_of_a_link(tmp_path: Path) -> None:
    first = results(**{QKV.key: QKV_MEASURED})
    later = results(**{QKV.key: measured(gemm=160, collective=170, monolithic=170)})
    two = Results(ON, "nvlink", 2, sites={dataclasses.replace(OUT_70B, axis_size=2): OUT_MEASURED})
    slow = Results(ON, "no-p2p", 4, sites={QKV: OUT_MEASURED})
    other = Results(ON, "nvlink", 4, "connections1", {OUT_70B: OUT_MEASURED})
    assert len(groups([first, two, slow, other])) == 4
    paths = ship([first, later, two, slow, other], tmp_path)
    assert [path.name for path in paths] == ["h200-nvlink.json", "h200-no-p2p.json"]
    times = collective_matmul_times.load(paths[0])
    assert set(times.sites) == {QKV, dataclasses.replace(OUT_70B, axis_size=2)}
    assert choose(QKV, times) == Form("hybrid", 4)
    assert 1e6 * times.sites[QKV].forms[Form("hybrid", 4)].seconds == pytest.approx(125)  # 250 scaled by 170/340
    assert merged([first, later]).sites[QKV].gemm.samples == 3


def test_it_runs_on_cpu_devices_goes_on_where_it_stopped_and_drops_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(x: jax.Array, w: jax.Array, axis_name: str, form: Form) -> jax.Array:
        return lax.psum_scatter(jnp.dot(x, w), axis_name, tiled=True) * (0 if form.name == "ring" else 1)

    flags = ["--devices", "4", "--shapes", "16x8x12", "--iterations", "2", "--rounds", "2", "--out", str(tmp_path)]
    path = collective_matmul.measure(arguments(*flags, "--forms", "ring,hybrid:2,mosaic", "--kinds", GATHER))
    (found,) = Results.read(path).sites.values()
    assert set(found.us) == {GEMM, COLLECTIVE, "monolithic", "ring", "hybrid:2"}
    assert all(len(us) == 2 and min(us) > 0 for us in found.us.values())
    assert set(found.differs) == {"monolithic", "ring", "hybrid:2"} and max(found.differs.values()) < 0.02
    assert "has no kernel here" in found.failed["mosaic"]

    monkeypatch.setattr(collective_matmul_programs.collective_matmul, SCATTER, wrong)
    kinds = ("--kinds", f"{GATHER},{SCATTER}", "--known", str(path), "--forms", "ring")
    second = collective_matmul.measure(arguments(*flags, *kinds))
    assert second != path
    ((site, found),) = Results.read(second).sites.items()
    assert site.kind == SCATTER and "monolithic" in found.us and "ring" not in found.us
    assert found.failed["ring"].startswith("DhelixError: wrong by 1 of the largest result, allowed are 0.02")

    third = collective_matmul.measure(arguments(*flags, "--kinds", f"{GATHER},{SCATTER}", "--budget_s", "1e-9"))
    assert Results.read(third).sites == {} and len(Results.read(third).dropped) == 2


def test_mistakes_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in (["--shapes", "llama-9b"], ["--rows", "many"], ["--forms", "rings"], ["--kinds", "gemm"]):
        monkeypatch.setattr(sys, "argv", ["collective_matmul.py", "--devices", "2", *flags])
        with pytest.raises(SystemExit) as raised:
            collective_matmul.main()
        assert isinstance(raised.value.code, str) and "\n" not in raised.value.code
