"""The NCCL tuner plugin, asked as NCCL asks it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dhelix.runtime.tuning import plugin
from dhelix.runtime.tuning.plugin import Plugin, TunerError
from dhelix.tests.runtime.tuning.nccl import USUAL, Chosen, Communicator

GATHER, SCATTER = 1 << 26, 1 << 25
LAYER = f"1 2 {GATHER} 1 2 4 0\n1 2 {GATHER} 1 1 16 0\n1 3 {SCATTER} -1 -1 8 0"
"""Two equal all-gathers with different settings, and a reduce-scatter."""
FIRST, SECOND, THIRD = Chosen("ring", "simple", 4), Chosen("ring", "ll128", 16), Chosen("ring", "simple", 8)
UNSET = Chosen(*USUAL)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plugin.build(tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def loaded(library: Path) -> Iterator[Plugin]:
    made = Plugin(library)
    yield made
    made.load("")
    made.record(0)


def layer(nccl: Communicator) -> list[Chosen]:
    return [
        nccl.ask("all-gather", GATHER),
        nccl.ask("all-gather", GATHER),
        nccl.ask("reduce-scatter", SCATTER),
    ]


@pytest.mark.parametrize("interface", [3, 4, 5, 6])
def test_equal_collectives_of_a_layer_get_settings_of_their_own(loaded: Plugin, interface: int) -> None:
    loaded.load(f"sequence\n{LAYER}")
    nccl = Communicator(loaded.path, interface)
    for _ in range(3):
        assert layer(nccl) == [FIRST, SECOND, THIRD]
    nccl.end()


def test_without_a_table_nccl_decides(loaded: Plugin) -> None:
    nccl = Communicator(loaded.path)
    assert layer(nccl) == [UNSET] * 3
    loaded.load(f"sequence\n{LAYER}")
    assert layer(nccl) == [FIRST, SECOND, THIRD]
    loaded.load("")
    assert layer(nccl) == [UNSET] * 3


def test_all_ranks_decide_alike_also_after_collectives_of_other_programs(loaded: Plugin) -> None:
    """An evaluation runs two of the step's all-gathers, and one collective that the step does not have."""
    loaded.load(f"sequence\n{LAYER}")
    ranks = [Communicator(loaded.path) for _ in range(2)]
    for _ in range(2):
        assert [layer(nccl) for nccl in ranks] == [[FIRST, SECOND, THIRD]] * 2
    found = [
        (nccl.ask("all-gather", GATHER), nccl.ask("all-reduce", 4), nccl.ask("all-gather", GATHER)) for nccl in ranks
    ]
    assert found[0] == found[1] and found[0][1] == UNSET
    first_steps = [layer(nccl) for nccl in ranks]
    assert first_steps[0] == first_steps[1]
    assert [layer(nccl) for nccl in ranks] == [[FIRST, SECOND, THIRD]] * 2  # found again within a step


def test_an_evaluation_between_steps_costs_no_place(loaded: Plugin) -> None:
    loaded.load(f"sequence\n{LAYER}")
    nccl = Communicator(loaded.path)
    for _ in range(5):
        assert layer(nccl) == [FIRST, SECOND, THIRD]
        assert [nccl.ask("all-reduce", 4), nccl.ask("all-gather", 4096)] == [UNSET, UNSET]


def test_a_communicator_finds_its_sequence(loaded: Plugin) -> None:
    other = f"1 3 {SCATTER} 0 2 2 0\n1 2 {GATHER} -1 -1 0 0\n1 3 {SCATTER} 0 2 2 0"
    loaded.load(f"sequence\n{LAYER}\nsequence\n{other}")
    data, tensor = Communicator(loaded.path), Communicator(loaded.path)
    tree = Chosen("tree", "simple", 2)

    def step() -> list[Chosen]:
        return [
            tensor.ask("reduce-scatter", SCATTER),
            tensor.ask("all-gather", GATHER),
            tensor.ask("reduce-scatter", SCATTER),
        ]

    for _ in range(2):  # until the questions so far fit one sequence only
        layer(data)
        step()
    for _ in range(2):
        assert layer(data) == [FIRST, SECOND, THIRD]
        assert step() == [tree, UNSET, tree]


def test_repeated_lines_are_a_loop(loaded: Plugin) -> None:
    loaded.load(f"sequence\n3 2 {GATHER} 1 2 4 0\n1 3 {SCATTER} -1 -1 8 0")
    nccl = Communicator(loaded.path)
    for _ in range(2):
        assert [nccl.ask("all-gather", GATHER) for _ in range(3)] == [FIRST] * 3
        assert nccl.ask("reduce-scatter", SCATTER) == THIRD


def test_chunks_need_interface_6(loaded: Plugin) -> None:
    loaded.load(f"sequence\n1 2 {GATHER} 1 2 4 131072")
    assert Communicator(loaded.path, 6).ask("all-gather", GATHER) == Chosen("ring", "simple", 4, 131072)
    assert Communicator(loaded.path, 5).ask("all-gather", GATHER) == Chosen("ring", "simple", 4, 0)


def test_what_a_communicator_cannot_run_is_left_to_nccl_and_counted(loaded: Plugin) -> None:
    loaded.load(f"sequence\n1 2 {GATHER} 4 2 4 0")
    before = loaded.counts()
    assert Communicator(loaded.path).ask("all-gather", GATHER) == UNSET
    after = loaded.counts()
    assert (after.impossible - before.impossible, after.applied - before.applied) == (1, 0)
    assert (after.matched - before.matched, after.communicators - before.communicators) == (1, 1)


@pytest.mark.parametrize(
    ("usual", "nodes", "channels"),
    [
        ("ring", 2, 32),  # NCCL cuts them to what the communicator has
        ("nvls", 1, 32),
        ("nvls", 2, 6),
        ("collnet-direct", 2, 6),
        ("collnet-chain", 2, 6),
    ],
)
def test_channels_that_nccl_would_not_cut_are_its_own(loaded: Plugin, usual: str, nodes: int, channels: int) -> None:
    loaded.load(f"sequence\n1 2 {GATHER} -1 -1 32 0")
    nccl = Communicator(loaded.path, ranks=16, nodes=nodes, usual=(usual, "simple", 6))
    assert nccl.ask("all-gather", GATHER) == Chosen(usual, "simple", channels)
    # The algorithm of a setting counts, not the one that NCCL would have chosen.
    loaded.load(f"sequence\n1 2 {GATHER} 1 2 32 0")
    assert nccl.ask("all-gather", GATHER) == Chosen("ring", "simple", 32)


def test_questions_are_recorded(loaded: Plugin) -> None:
    nccl = Communicator(loaded.path, ranks=8)
    loaded.record(2)
    layer(nccl)
    assert [(one.ranks, one.kind, one.bytes, one.matched) for one in loaded.recorded()] == [
        (8, "all-gather", GATHER, False)
    ] * 2


@pytest.mark.parametrize(
    "table",
    [
        f"1 2 {GATHER} 1 2 4 0",
        "sequence",
        f"sequence\n0 2 {GATHER} 1 2 4 0",
        f"sequence\n1 9 {GATHER} 1 2 4 0",
        f"sequence\n1 2 {GATHER} 1 -1 4 0",
        f"sequence\n1 2 {GATHER} 1 2 65 0",
        f"sequence\n1 2 {GATHER} 1 2 4 0 0",
        f"sequence\n1 2 {GATHER} 1 2 4",
        "sequence\nall-gather",
    ],
)
def test_a_wrong_table_is_refused_and_the_one_before_stays(loaded: Plugin, table: str) -> None:
    loaded.load(f"sequence\n{LAYER}")
    with pytest.raises(TunerError, match="cannot be read"):
        loaded.load(table)
    assert layer(Communicator(loaded.path)) == [FIRST, SECOND, THIRD]


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(TunerError, match="need a C compiler"):
        plugin.build(tmp_path)
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(TunerError, match="/bin/false cannot build"):
        plugin.build(tmp_path)
    assert not list(tmp_path.rglob("*.so"))


def test_another_plugin_of_the_user_stays(monkeypatch: pytest.MonkeyPatch, loaded: Plugin) -> None:
    monkeypatch.setattr(plugin, "_of_process", lambda: loaded)
    monkeypatch.setenv(plugin.VARIABLE, "libnccl-ofi-tuner.so")
    with pytest.raises(TunerError, match="is another plugin"):
        plugin.install()
    monkeypatch.setenv(plugin.VARIABLE, "")
    assert plugin.install() is loaded and os.environ[plugin.VARIABLE] == str(loaded.path)


@pytest.mark.parametrize(
    ("environment", "replaced"),
    [
        ({}, ""),
        ({"NCCL_CTA_POLICY": "0"}, ""),
        ({"NCCL_CTA_POLICY": "1"}, "NCCL_CTA_POLICY=1"),
        ({"NCCL_CTA_POLICY": "2"}, ""),
        ({"NCCL_CTA_POLICY": "efficiency|default"}, "NCCL_CTA_POLICY=efficiency|default"),
        ({"NCCL_CTA_POLICY": "EFFICIENCY|ZERO"}, ""),
        ({"NCCL_CTA_POLICY": "1", "NCCL_ALGO": "ring"}, ""),
    ],
)
def test_the_policy_that_nccl_leaves_out_beside_a_plugin_is_known(environment: dict[str, str], replaced: str) -> None:
    assert plugin.replaces_policy(environment) == replaced
