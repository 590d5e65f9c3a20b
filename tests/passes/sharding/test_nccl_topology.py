"""NCCL's topology dumps: what GPUs of a node share, and one error for each file that is no dump of a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhelix.passes.sharding.factors import ShardingError
from dhelix.passes.sharding.nccl_topology import NodeTopology
from dhelix.passes.sharding.placement import place

DUMPS = Path(__file__).parents[2] / "testdata" / "topologies"


def test_gpus_without_nvlink_share_cpus_and_switches() -> None:
    node = NodeTopology.load(DUMPS / "pcie-8.xml")
    assert [gpu.number for gpu in node.gpus if gpu.cpu == "0"] == [0, 1, 4, 5]
    assert node.gpus[0].switches == node.gpus[1].switches == ("0000:01:00.0",) != node.gpus[4].switches
    assert not node.joined and node.parts([0, 1, 2, 3]) == {"between CPUs": 2}
    assert node.parts([0, 5]) == {"between CPUs": 1}
    assert place(node.domains, [4, 2]) == (0, 1, 4, 5, 2, 3, 6, 7)


def test_an_nvswitch_joins_all_gpus() -> None:
    node = NodeTopology.load(DUMPS / "nvswitch-8.xml")
    assert node.joined and {gpu.cpu for gpu in node.gpus} == {"0", "1"}
    assert node.parts(list(range(8))) == {}


def test_bridges_join_pairs() -> None:
    node = NodeTopology.load(DUMPS / "bridges-4.xml")
    assert [gpu.island for gpu in node.gpus] == [0, 1, 1, 0]
    assert node.parts([0, 1]) == {"outside of NVLink": 2} and node.parts([0, 3]) == {"outside of NVLink": 1}
    assert place(node.domains, [2]) == (0, 3, 1, 2)


def test_nvlink_between_cpus_counts_more_than_the_cpu() -> None:
    def gpu(number: int, other: int) -> str:
        return f'<pci busid="B{number}"><gpu dev="{number}"><nvlink target="b{other}" tclass="0x030200"/></gpu></pci>'

    cpus = (f'<cpu numaid="{n}">{gpu(n, n + 2)}{gpu(n + 2, n)}</cpu>' for n in (0, 1))
    assert place(NodeTopology.of(f"<system>{''.join(cpus)}</system>").domains, [2]) == (0, 2, 1, 3)
    crossed = f'<cpu numaid="0">{gpu(0, 2)}{gpu(1, 3)}</cpu><cpu numaid="1">{gpu(2, 0)}{gpu(3, 1)}</cpu>'
    node = NodeTopology.of(f"<system>{crossed}</system>")
    assert place(node.domains, [2]) == (0, 2, 1, 3)
    assert node.parts([0, 2]) == {"between CPUs": 1, "outside of NVLink": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<system><cpu>", "no XML"),
        ("", "no XML"),
        ("<graphs/>", "expected <system>, as in NCCL's dumps, not <graphs>"),
        ('<!DOCTYPE system [<!ENTITY a "b">]><system/>', "declare no document type"),
        ("<system/>", "expected GPUs with dev 0, 1, ..., but it has none"),
        ('<system><cpu><pci><gpu dev="1"/></pci></cpu></system>', "but it has 1; dump a job on all GPUs"),
        ('<system><cpu><pci><gpu dev="x"/></pci></cpu></system>', "a GPU has dev='x', which is no number"),
        ('<system><cpu host_hash="1"/><cpu host_hash="2"/></system>', "describes 2 hosts"),
    ],
)
def test_files_that_are_no_dump(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "node.xml"
    path.write_text(text)
    with pytest.raises(ShardingError, match="node.xml: ") as raised:
        NodeTopology.load(path)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_dump_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match="cannot be read"):
        NodeTopology.load(tmp_path / "none.xml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ShardingError, match="not a text file"):
        NodeTopology.load(tmp_path / "binary")
