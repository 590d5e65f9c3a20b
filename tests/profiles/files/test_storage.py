"""Profile files lose nothing and admit no wrong values."""

import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhelix.errors import DhelixError
from dhelix.profiles.files import storage
from dhelix.profiles.keys import CollectiveKey, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Provenance, Section, Timing

GEMM = OperatorKey("gemm", "bf16,bf16->bf16:nt:cublaslt", (8192, 4096, 1536), 103079215104.0, 92274688)
NORM = OperatorKey("fusion", "loop:8f3c", (8192, 4096), 1e8, 134217728)
SCALAR = OperatorKey("other", "rng", ())
GATHER = CollectiveKey("all-gather", 1 << 26, 4)
REDUCE = CollectiveKey("all-reduce", 1 << 20, 2, nodes=2, groups=2, implementation="symmetric")
H200 = Provenance("NVIDIA H200", 4, "2026-01-31", "580.65", "13.0", "2.28.9", "0.11.2", "9f3a")

DEFAULT = Section(
    "default",
    {GEMM: Timing(171.03e-6, 0.62e-6, 40), NORM: Timing(58.2e-6, 0.0, 3, "trace"), SCALAR: Timing(0.0)},
    {GATHER: Timing(245.8e-6, 3.1e-6, 40, "trace"), REDUCE: Timing(1.2345)},
    {
        PairKey(GEMM, GATHER): PairTiming(301.5e-6, 236.2e-6, 298.1e-6, 170.4e-6, 246e-6, 4.7e-6, 20),
        PairKey(GATHER, GEMM): PairTiming(310e-6, 240e-6, 299e-6, 245.1e-6, 171e-6),
    },
    gap_seconds=1.2e-6,
    failures={f"{GEMM} + {REDUCE}": "out of memory"},
)
PROFILE = Profile("H200", "nvlink", (H200,), {"default": DEFAULT, "connections1": Section("connections1")})


def _parsed(change: Callable[[dict[str, Any]], object]) -> Profile:
    content = json.loads(storage.dumps(PROFILE))
    change(content)
    return storage.loads(json.dumps(content), "f.json")


def test_a_profile_comes_back_whole() -> None:
    back = storage.loads(storage.dumps(PROFILE), "f.json")
    assert (back.hardware, back.link, back.measured_on) == ("H200", "nvlink", (H200,))
    assert back.sections.keys() == PROFILE.sections.keys()
    section = back.section("default")
    assert section.pairs.keys() == DEFAULT.pairs.keys()
    assert section.failures == DEFAULT.failures
    assert section.gap_seconds == pytest.approx(DEFAULT.gap_seconds)
    for key in (GEMM, NORM, SCALAR, GATHER, REDUCE):
        ours, theirs = section.solo(key), DEFAULT.solo(key)
        assert ours and theirs
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-4)
        assert ours.spread == pytest.approx(theirs.spread, rel=1e-2)
        assert (ours.samples, ours.source) == (theirs.samples, theirs.source)
    pair = PairKey(GEMM, GATHER)
    ours, theirs = section.pairs[pair], DEFAULT.pairs[pair]
    assert asdict(ours) == pytest.approx(asdict(theirs))


def test_operations_and_bytes_of_operators_come_back() -> None:
    back = storage.loads(storage.dumps(PROFILE), "f.json").section("default")
    assert {key.sizes: (key.flops, key.bytes) for key in back.operators} == {
        GEMM.sizes: (GEMM.flops, GEMM.bytes),
        NORM.sizes: (NORM.flops, NORM.bytes),
        SCALAR.sizes: (0.0, 0),
    }


@given(st.lists(st.floats(0, 9e3), min_size=6, max_size=6), st.floats(0, 1e20))
def test_writing_what_was_read_changes_nothing(seconds: list[float], flops: float) -> None:
    *times, spread = seconds
    key = replace(GEMM, flops=flops)
    pair = PairKey(key, GATHER)
    section = Section("x", {key: Timing(times[0], spread)}, {}, {pair: PairTiming(*times, spread=spread)})
    text = storage.dumps(Profile("H200", "nvlink", (), {"x": section}))
    assert storage.dumps(storage.loads(text, "f.json")) == text


def test_equal_profiles_are_equal_bytes() -> None:
    def shuffled(mapping: Any) -> dict[Any, Any]:
        items = list(mapping.items())
        random.Random(0).shuffle(items)
        return dict(items)

    parts = {name: shuffled(getattr(DEFAULT, name)) for name in ("operators", "collectives", "pairs")}
    other = replace(PROFILE, sections=shuffled({**PROFILE.sections, "default": replace(DEFAULT, **parts)}))
    assert storage.dumps(other) == storage.dumps(PROFILE)


def test_a_file_reads_as_one_fact_a_line() -> None:
    lines = storage.dumps(PROFILE).splitlines()
    assert '["gemm bf16,bf16->bf16:nt:cublaslt 8192x4096x1536", 103079215104, 92274688],' in lines
    assert '["all-gather 67108864B 4x1 groups=1 nccl"],' in lines
    assert '[1, 171.03, 0.62, 40, "alone"],' in lines
    assert "[1, 3, 301.5, 236.2, 298.1, 170.4, 246, 4.7, 20]," in lines


def test_reasons_of_failures_become_one_short_line() -> None:
    section = Section("default", failures={str(GEMM): "RESOURCE_EXHAUSTED:\n\tout of \x1b[31mmemory" + "!" * 1000})
    back = storage.loads(storage.dumps(Profile("H200", "nvlink", (), {"default": section})), "f.json")
    reason = back.section("default").failures[str(GEMM)]
    assert reason.startswith("RESOURCE_EXHAUSTED: out of [31mmemory!") and len(reason) == 300


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_what_could_not_be_read_is_not_written(bad: float, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    storage.save(PROFILE, path)
    broken = PROFILE.with_section(Section("default", {GEMM: Timing(bad)}))
    with pytest.raises(storage.ProfileFileError):
        storage.save(broken, path)
    assert storage.load(path) == storage.loads(storage.dumps(PROFILE), "")
    assert os.listdir(tmp_path) == ["f.json"]


def test_unknown_fields_cost_nothing_else() -> None:
    def change(content: dict[str, Any]) -> None:
        content["more"] = {"deep": [1]}
        content["measured_on"][0]["clock"] = "1980 MHz"
        content["keys"][0].append("later")
        content["sections"]["default"]["power"] = [1]
        content["sections"]["default"]["alone"][0].append(7)
        content["sections"]["default"]["pairs"][0].append(7)

    assert _parsed(change) == storage.loads(storage.dumps(PROFILE), "f.json")


def test_parts_may_be_missing() -> None:
    text = '{"schema": 1, "hardware": "H200", "link": "nvlink"}'
    assert storage.loads(text, "f.json") == Profile("H200", "nvlink")


def _set(*way: Any) -> Callable[[dict[str, Any]], object]:
    """Sets a value in nested containers. `way` holds the keys that lead to it, and then the value."""
    *steps, last, value = way

    def change(content: Any) -> None:
        for step in steps:
            content = content[step]
        content[last] = value

    return change


_ALONE = ("sections", "default", "alone", 0)
_PAIR = ("sections", "default", "pairs", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("schema", 2), r"f.json: written by a newer dhelix \(schema 2; this one reads 1\): upgrade"),
        (_set("schema", "1"), "schema: expected a whole number"),
        (_set("schema", True), "schema: expected a whole number"),
        (_set("hardware", "../H200"), "hardware: expected a name of letters"),
        (_set("link", 3), "link: expected printable text"),
        (_set("measured_on", {}), "measured_on: expected `array`, got `object`"),
        (_set("measured_on", 0, "gpus", 0), "measured_on.0.gpus: expected `int` >= 1"),
        (_set("measured_on", 0, "gpu", "\x1b[2J"), "measured_on.0.gpu: expected printable"),
        (_set("keys", 0, 0, "softmax bf16 8"), "keys.0: expected the key of an operator or a collective"),
        (_set("keys", 0, 0, "gemm bf16 0008"), "keys.0: expected a key as dhelix writes it"),
        (_set("keys", 0, 0, f"gemm bf16 {1 << 70}"), "keys.0: expected a key as dhelix writes it"),
        (_set("keys", 0, ["gemm bf16 8"]), r"keys.0: expected \[key, operations, bytes\]"),
        (_set("keys", 0, 1, -1), "keys.0.1: expected `float` >= 0"),
        (_set("keys", 0, 2, 0.5), "keys.0.2: expected `int"),
        (_set("keys", 0, []), "keys.0: expected `array` of at least length 1"),
        (lambda c: c["keys"].append(c["keys"][0]), "keys: a key occurs twice"),
        (lambda c: c.update(keys=[]), "expected positions of keys, of which there are 0"),
        (_set("sections", []), "sections: expected `object`"),
        (_set("sections", {"\x00": {}}), "sections: name of a field: expected printable"),
        (_set("sections", {str(i): {} for i in range(1000)}), "sections: expected `object` of length <= 64"),
        (_set(*_ALONE, 0, 99), "sections.default: expected positions of keys, of which there are 5"),
        (_set(*_ALONE, 0, -1), "alone.0.0: expected `int` >= 0"),
        (_set(*_ALONE, 1, "1"), "alone.0.1: (expected `float`|number out of range)"),
        (_set(*_ALONE, 1, None), "alone.0.1: (expected `float`|number out of range)"),
        (_set(*_ALONE, 1, 10**400), "alone.0.1: (expected `float`|number out of range)"),
        (_set(*_ALONE, 2, -0.5), "alone.0.2: expected `float` >= 0"),
        (_set(*_ALONE, 3, 0), "alone.0.3: expected `int` >= 1"),
        (_set(*_ALONE, 3, False), "alone.0.3: expected `int`, got `bool`"),
        (_set(*_ALONE, 4, "guess"), "alone.0.4: invalid enum value"),
        (_set(*_ALONE, [0, 1]), "alone.0: expected `array` of at least length 5"),
        (lambda c: c["sections"]["default"]["alone"].append(c["sections"]["default"]["alone"][0]), "a second time of"),
        (_set(*_PAIR, 1, 5), "expected positions of keys, of which there are 5"),
        (_set(*_PAIR, 6, -1), "pairs.0.6: expected `float` >= 0"),
        (_set(*_PAIR, 8, 0), "pairs.0.8: expected `int` >= 1"),
        (_set(*_PAIR, [1, 3, 301.5, 236.2, 298.1, 4.7, 20]), "pairs.0: expected `array` of at least length 9"),
        (lambda c: c["sections"]["default"]["pairs"].append(c["sections"]["default"]["pairs"][0]), "a second time of"),
        (_set("sections", "default", "gap_us", [1]), "gap_us: expected `float"),
        (_set("sections", "default", "failures", {"x": 1}), r"failures.\*: expected printable text"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(storage.ProfileFileError, match=message) as raised:
        _parsed(change)
    text = str(raised.value)
    assert text.startswith("f.json: ") and "\n" not in text and text.isprintable() and len(text) < 300


@pytest.mark.parametrize("field", ["hardware", "link"])
def test_what_is_missing_is_named(field: str) -> None:
    with pytest.raises(storage.ProfileFileError, match=f"`{field}` is missing"):
        _parsed(lambda content: content.pop(field))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ends too early"),
        ("PNG", "is not JSON"),
        ("[]", "not an object"),
        ("3", "not an object"),
        ('{"version": 4}', 'not a profile \\(it has no "schema"\\)'),
        ('{"schema": NaN}', "NaN is not a number that a profile may hold"),
        ('{"schema": ' + "9" * 5000 + "}", "not a profile"),
        ("[" * 100_000, "not a profile|ends too early"),
    ],
)
def test_foreign_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(storage.ProfileFileError, match=message):
        storage.loads(text, "f.json")


def test_a_cut_file_is_refused_wherever_it_is_cut() -> None:
    text = storage.dumps(PROFILE).rstrip()
    for end in range(len(text)):
        with pytest.raises(storage.ProfileFileError, match="f.json: line"):
            storage.loads(text[:end], "f.json")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=6,
)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), _JSON)
def test_whatever_stands_in_a_file_is_a_profile_or_an_error(way: list[int], value: Any) -> None:
    def change(content: Any) -> None:
        place = content
        for step in way:
            names = sorted(place) if isinstance(place, dict) else range(len(place))
            if not names:
                return
            last, name = place, names[step % len(names)]
            place = place[name]
            if not isinstance(place, dict | list) or step == 5:
                last[name] = value
                return

    try:
        profile = _parsed(change)
    except storage.ProfileFileError as error:
        assert str(error).isprintable()
    else:
        text = storage.dumps(profile)
        assert storage.dumps(storage.loads(text, "f.json")) == text


# --- Files and folders.


def test_saved_files_load(tmp_path: Path) -> None:
    path = tmp_path / "new" / "h200-nvlink.json"
    storage.save(PROFILE, path)
    assert path.read_text() == storage.dumps(PROFILE)
    assert storage.load(path).section("default").operators.keys() == DEFAULT.operators.keys()
    assert os.listdir(path.parent) == [path.name]


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"
    storage.save(PROFILE, path)
    before = path.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        storage.save(Profile("H200", "nvlink"), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["f.json"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DhelixError, match="cannot be written"):
        storage.save(PROFILE, tmp_path / "file" / "f.json")


def test_files_are_read_once_until_they_change(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    storage.save(PROFILE, path)
    first = storage.load(path)
    assert storage.load(path) is first
    storage.save(Profile("H200", "nvlink"), path)
    assert storage.load(path) == Profile("H200", "nvlink")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_unreadable_files_are_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(storage.ProfileFileError, match="f.json: .*check the path"):
        storage.load(path)
    with pytest.raises(storage.ProfileFileError, match="not a file"):
        storage.load(tmp_path)


def _with_time(seconds: float, key: OperatorKey = GEMM) -> Profile:
    return Profile("T1", "nvlink", (), {"default": Section("default", {key: Timing(seconds)})})


def test_later_places_override_entry_by_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.find("T1", "nvlink") is None
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for seconds, folder in enumerate(folders, start=1):
        storage.save(_with_time(seconds), folder / storage.file_name("T1", "nvlink"))
    storage.save(_with_time(9, NORM), tmp_path / "a" / "t1-other.json")
    storage.save(_with_time(8, NORM), tmp_path / "extra.json")

    monkeypatch.setenv(storage.SEARCH_PATH, os.pathsep.join(map(str, folders[:2])))
    found = storage.find("T1", "nvlink")
    assert found and found.section("default").operators == {GEMM: Timing(2.0)}
    found = storage.find("t1", "nvlink", [folders[2], tmp_path / "extra.json"])
    assert found and found.section("default").operators == {GEMM: Timing(3.0), NORM: Timing(8.0)}


def test_operators_are_known_from_other_links_and_collectives_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(storage.SEARCH_PATH, str(tmp_path))
    storage.save(replace(PROFILE, hardware="T1"), tmp_path / "t1-nvlink.json")
    storage.save(Profile("T1", "no-p2p").with_section(Section("default")), tmp_path / "t1-no-p2p.json")
    (tmp_path / "t1-two-nodes.json").write_text("{")  # only a search for this link fails
    found = storage.find("T1", "no-p2p")
    assert found and found.elsewhere.keys() == DEFAULT.operators.keys()
    assert not found.section("default").operators and storage.dumps(found).count("gemm") == 0
    assert storage.find("T1", "default") is None
    with pytest.raises(storage.ProfileFileError, match=r"t1-two-nodes\.json"):
        storage.find("T1", "two-nodes")


def test_files_of_other_hardware_are_not_taken(tmp_path: Path) -> None:
    storage.save(PROFILE, tmp_path / "f.json")
    with pytest.raises(
        storage.ProfileFileError, match="measured on H200 with link nvlink, not on H100 with link nvlink"
    ):
        storage.find("H100", "nvlink", [tmp_path / "f.json"])


def test_places_that_are_asked_for_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(storage.ProfileFileError, match="cannot be read"):
        storage.find("T1", "nvlink", [tmp_path / "f.json"])
    monkeypatch.setenv(storage.SEARCH_PATH, str(tmp_path / "none"))
    with pytest.raises(DhelixError, match="DHELIX_PROFILES names .*none, which is not a folder"):
        storage.find("T1", "nvlink")


def test_shipped_files_are_as_they_would_be_written() -> None:
    for name in storage.shipped():
        path = storage.SHIPPED / f"{name}.json"
        profile = storage.load(path)
        assert path.name == storage.file_name(profile.hardware, profile.link)
        assert path.read_text() == storage.dumps(profile)
        found = storage.find(profile.hardware, profile.link)
        assert profile.measured_on and found and found.measured_on == profile.measured_on
        assert found.alike or replace(found, elsewhere={}) == profile


# --- Profiles measured on other hardware or with other versions.


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"gpu": "NVIDIA H100 80GB HBM3"},
            "measured with GPU NVIDIA H200, not NVIDIA H100 80GB HBM3: all",
        ),
        ({"nccl": "2.29.1"}, "measured with NCCL 2.28.9, not 2.29.1: times of collectives"),
        ({"cuda": "12.9"}, "measured with CUDA 13.0, not 12.9"),
        ({"jax": "0.12.0"}, "measured with jax 0.11.2, not 0.12.0"),
        ({"jax": "1.0.0"}, "measured with jax 0.11.2, not 1.0.0"),
    ],
)
def test_other_hardware_and_versions_are_said(change: dict[str, str], line: str) -> None:
    (said,) = storage.differences(PROFILE, replace(H200, **change))
    assert said.startswith("profile H200 nvlink was ") and line in said and said.endswith("run `dhelix profile`")


@pytest.mark.parametrize(
    "here",
    [
        H200,
        Provenance("H200", 8, nccl="2.28.3", jax="0.11.9", cuda="13.2", driver="999", machine="other"),
        Provenance("", 1),
    ],
)
def test_the_same_and_the_unknown_are_no_difference(here: Provenance) -> None:
    assert storage.differences(PROFILE, here) == ()
    assert storage.differences(Profile("H200", "nvlink"), here) == ()


def test_every_measurement_of_a_merged_profile_counts() -> None:
    merged = replace(PROFILE, measured_on=(H200, replace(H200, nccl="2.27.3"), replace(H200, nccl="2.26.0")))
    (said,) = storage.differences(merged, H200)
    assert "NCCL 2.26.0, 2.27.3, not 2.28.9" in said
    assert len(storage.differences(merged, Provenance("A40", 1, nccl="2.30", jax="0.12"))) == 3
