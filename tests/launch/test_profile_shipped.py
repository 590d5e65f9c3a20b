"""`dhelix profile` makes tables, pictures and XLA's files from a compiled step and the shipped measurements.

The step in `tests/testdata/profile` is the forward and backward of one micro-batch: Llama-8B shapes, 4 layers, TP 4,
sequence 8192. It is the body of the train step's loop over micro-batches, without metadata. XLA compiled it on H200s
with autotuned kernels. A step compiled without GPUs would have kernels that were not measured.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dhelix.launch import cli
from dhelix.launch.profile import workers
from dhelix.profiles.files import storage, xla_tables
from dhelix.profiles.keys import CollectiveKey

STEP = Path(__file__).parents[1] / "testdata" / "profile" / "llama_8b_microbatch.txt"
SHIPPED = storage.SHIPPED / "h200-nvlink.json"
SETTINGS = ("default", "connections1")
ENOUGH = 0.95
"""The fraction of the step's time that must be measured. With a profile of the very same kernels it is 1."""


@pytest.fixture(autouse=True)
def no_gpus_and_no_profiles_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiles").mkdir()
    monkeypatch.setenv(storage.SEARCH_PATH, str(tmp_path / "profiles"))
    monkeypatch.setattr(workers, "gpus_here", lambda: ("", 0))


def dhelix_profile(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["profile", *map(str, arguments)])
    return stopped.value.code or 0  # type: ignore[return-value]


def test_from_the_step_to_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "SHIPPED", tmp_path / "none")  # the only profile is the file that the command writes
    out, heat_map = tmp_path / "out.json", tmp_path / "pairs.png"
    costs, table = tmp_path / "costs.pbtxt", tmp_path / "table.pbtxt"
    files = ["--heat_map", heat_map, "--pgle", costs, "--perf_table", table, "--compare", SHIPPED]
    recorded = ["--recorded", SHIPPED, "--out", out, f"--settings={','.join(SETTINGS)}"]
    assert dhelix_profile(STEP, *recorded, *files, "--json") == 0
    shown = capsys.readouterr()
    assert shown.err.rstrip().endswith(f", {costs}, {table}.")  # the last line begins with "Wrote"
    result: dict[str, Any] = json.loads(shown.out)
    assert (result["hardware"], result["link"], result["gpus"]) == ("H200", "nvlink", 4)
    assert set(result["settings"]) == set(SETTINGS)
    for setting in SETTINGS:
        of_setting = result["settings"][setting]
        assert of_setting["coverage"]["measured"] > ENOUGH and not of_setting["unknown_loops"]
        calls = {row["key"]: row["calls"] for row in of_setting["operators"] + of_setting["collectives"]}
        assert calls["all-gather 67108864B 4x1 groups=1 nccl"] == 18  # two per layer and direction, and two in the head
        assert sum(key.startswith("attention") for key in calls) == 2
        assert len(of_setting["pairs"]) > 50
        picture = heat_map.with_stem(f"pairs-{setting}")
        assert picture.read_bytes().startswith(b"\x89PNG")
    shipped, written = storage.load(SHIPPED), storage.load(out)
    assert written.measured_on == shipped.measured_on
    for agreement in result["agreement"]:
        assert agreement["compared"] > 0 and agreement["p90"] < 1e-3, "what was recorded is not what is written"
    seconds = xla_tables.parse_cost_text(costs.read_text(), "costs")
    assert sum(seconds.values()) > 1e-3 and min(seconds.values()) > 0
    section = shipped.section("default")
    of_table = xla_tables.parse_collective_table(table.read_text(), "table")
    gather = CollectiveKey("all-gather", 64 * 2**20, 4)
    assert of_table[gather] == pytest.approx(section.collectives[gather].seconds, rel=1e-3)


def test_what_is_shipped_is_known_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert dhelix_profile(STEP, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["settings"]["default"]["coverage"]["measured"] > ENOUGH
