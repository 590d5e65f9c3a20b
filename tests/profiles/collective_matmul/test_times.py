"""Files with times of collective matmuls lose nothing and admit no wrong values. Users' files take precedence."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul import times as files
from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form, Site, SiteTimes, Tiles, Times, choose
from dhelix.profiles.files.codec import ProfileFileError
from dhelix.profiles.profile import Provenance, Timing

SITE = Site("all_gather_matmul", 8192, 4096, 1536, "bfloat16", 4)
OTHER = Site("matmul_all_reduce", 1024, 2048, 8192, "bfloat16", 4)
MOSAIC = Form("mosaic", tiles=Tiles(128, 256, 64, 4, "N", 8, 132))
SHORT_TILES = Form("mosaic", tiles=Tiles(128, 128, 64, 4, "M", 8))
ON = Provenance("NVIDIA H200", 4, "2026-01-31", "580.65", "13.0", "2.28.9", "0.11.2", "9f3a")


def us(median: float, spread: float = 0.0, samples: int = 8) -> Timing:
    return Timing(median / 1e6, spread / 1e6, samples)


TIMES = Times("H200", "nvlink", "default", (ON,), {
    SITE: SiteTimes(us(161.4, 0.3), us(170.2, 0.9), {
        MONOLITHIC: us(338.1, 1.25), Form("hybrid", 4): us(250), Form("hybrid", 8): us(240), MOSAIC: us(190.5, 0.6),
        SHORT_TILES: us(200),
    }),
    OTHER: SiteTimes(us(58.0), us(91.0), {MONOLITHIC: us(150), Form("ring"): us(160)}),
})  # fmt: skip


def parsed(change: Callable[[dict[str, Any]], object]) -> Times:
    content = json.loads(files.dumps(TIMES))
    change(content)
    return files.loads(json.dumps(content), "f.json")


def test_times_come_back_and_writing_them_again_changes_nothing() -> None:
    text = files.dumps(TIMES)
    back = files.loads(text, "f.json")
    assert (back.hardware, back.link, back.setting, back.measured_on) == ("H200", "nvlink", "default", (ON,))
    assert list(back.sites) == [SITE, OTHER]
    for site, there in TIMES.sites.items():
        here = back.sites[site]
        assert here.gemm.seconds == pytest.approx(there.gemm.seconds)
        assert here.collective.spread == pytest.approx(there.collective.spread)
        assert {f: t.seconds for f, t in here.forms.items()} == pytest.approx(
            {f: t.seconds for f, t in there.forms.items()}
        )
        assert choose(site, back) == choose(site, TIMES)
    assert files.dumps(back) == text


def test_a_file_reads_as_one_fact_a_line() -> None:
    lines = files.dumps(TIMES).splitlines()
    assert '"all_gather_matmul bfloat16 8192x4096x1536 over 4": {' in lines
    assert '"gemm": [161.4, 0.3, 8],' in lines
    assert '"hybrid:4": [250, 0, 8],' in lines
    assert '"mosaic:128x256x64,steps=4,wide=N,group=8,sms=132": [190.5, 0.6, 8]' in lines


def put(*way: Any) -> Callable[[dict[str, Any]], object]:
    """Sets a value in nested containers. `way` holds the keys that lead to it, and then the value."""
    *steps, last, value = way

    def change(content: Any) -> None:
        for step in steps:
            content = content[step]
        content[last] = value

    return change


WHOLE = {"gemm": [1, 0, 1], "collective": [1, 0, 1], "forms": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("schema", 2), r"f.json: written by a newer dhelix \(schema 2; this one reads 1\): upgrade"),
        (lambda c: c.pop("schema"), 'JSON, but not a file of collective matmuls\' times \\(it has no "schema"\\)'),
        (lambda c: c.pop("link"), "`link` is missing: correct it, or measure again"),
        (put("hardware", 3), "hardware: expected printable text"),
        (put("sites", []), "sites: expected `object`"),
        (put("sites", "gemm 8x8x8", WHOLE), "is not a collective matmul: write"),
        (
            put("sites", "all_gather_matmul bfloat16 08x8x8 over 4", WHOLE),
            "write 'all_gather_matmul bfloat16 8x8x8 over",
        ),
        (put("sites", SITE.key, "gemm", [0, 0, 1]), "gemm.0: expected `float` > 0"),
        (put("sites", SITE.key, "gemm", [1, 0]), "gemm: expected `array` of at least length 3"),
        (put("sites", SITE.key, "gemm", [1, -1, 1]), "gemm.1: expected `float` >= 0"),
        (put("sites", SITE.key, "gemm", [1, 0, 0]), "gemm.2: expected `int` >= 1"),
        (lambda c: c["sites"][SITE.key].pop("collective"), "`collective` is missing"),
        (put("sites", SITE.key, "forms", "rings", [1, 0, 1]), "form of a collective matmul is 'rings'"),
        (put("sites", SITE.key, "forms", "hybrid:04", [1, 0, 1]), "write 'hybrid:4'"),
        (put("sites", SITE.key, "forms", "mosaic:1x2", [1, 0, 1]), "are not tiles"),
        (put("measured_on", 0, "gpus", 0), "measured_on.0.gpus: expected `int` >= 1"),
    ],
)
def test_unsound_files_are_refused_in_one_line(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(ProfileFileError, match=message) as raised:
        parsed(change)
    assert "\n" not in str(raised.value)


def test_unknown_fields_cost_nothing_else() -> None:
    def change(content: dict[str, Any]) -> None:
        content["more"] = {"deep": [1]}
        content["measured_on"][0]["clock"] = "1980 MHz"
        content["sites"][SITE.key]["power"] = 1
        content["sites"][SITE.key]["gemm"].append(7)

    assert parsed(change) == files.loads(files.dumps(TIMES), "f.json")
    assert files.loads('{"schema": 1, "hardware": "H200", "link": "nvlink"}', "f.json") == Times("H200", "nvlink")


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "f.json"
    files.save(TIMES, path)
    broken = Times("H200", "nvlink", sites={SITE: SiteTimes(us(math.nan), us(1), {})})
    with pytest.raises(ProfileFileError):
        files.save(broken, path)
    assert files.load(path) == files.loads(files.dumps(TIMES), "")
    assert [p.name for p in path.parent.iterdir()] == ["f.json"]
    with pytest.raises(DhelixError, match="cannot be written .*: choose another place"):
        files.save(TIMES, path / "f.json")
    with pytest.raises(ProfileFileError, match="check the path"):
        files.load(tmp_path / "none.json")


def test_users_times_count_more_than_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    monkeypatch.setattr(files, "_SHIPPED", shipped)
    user.mkdir()
    monkeypatch.setenv("DHELIX_PROFILES", str(user))
    assert files.find("H200", "nvlink") is None
    files.save(TIMES, shipped / "h200-nvlink.json")
    assert files.find("H200", "nvlink") == files.loads(files.dumps(TIMES), "")
    assert files.find("H200", "no-p2p") is None
    faster = SiteTimes(us(58), us(91), {MONOLITHIC: us(150), Form("ring"): us(100)})
    files.save(Times("H200", "nvlink", sites={OTHER: faster}), user / files.FOLDER / "h200-nvlink.json")
    both = files.find("H200", "nvlink")
    assert (choose(OTHER, both), choose(SITE, both)) == (Form("ring"), MOSAIC)
    files.save(TIMES, user / files.FOLDER / "h200-no-p2p.json")
    with pytest.raises(ProfileFileError, match="measured on H200 with link nvlink: rename this file to h200-nvlink"):
        files.find("H200", "no-p2p")


def test_shipped_files_are_sound_and_written_as_dhelix_writes_them() -> None:
    for path in sorted(files._SHIPPED.glob("*.json")):
        times = files.load(path)
        assert path.read_text() == files.dumps(times) and times.measured_on and times.sites


def test_the_table_has_shares_of_the_longer_side_and_the_choice() -> None:
    head, first, second = files.share_table(TIMES, {SITE: "qkv", OTHER: "out"})
    assert head[:7] == ("layer", "M", "K", "N", "n", "GEMM µs", "collective µs")
    assert dict(zip(head, first, strict=True)) == {
        "layer": "qkv", "M": "8192", "K": "4096", "N": "1536", "n": "4", "GEMM µs": "161",
        "collective µs": "170", "monolithic": "0.50", "ring": "", "bidirectional ring": "", "hybrid": "0.71",
        "mosaic": "0.89", "chosen": "mosaic 128x256x64", "over monolithic": "1.77",
    }  # fmt: skip
    assert second[-2:] == ("monolithic", "1.00")
