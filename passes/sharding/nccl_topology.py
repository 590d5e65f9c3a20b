"""A node's topology from NCCL's dump: which GPUs share NVLink, a CPU and PCIe switches.

    NCCL_TOPO_DUMP_FILE=node.xml python train.py      # NCCL writes the file when it makes its first communicator

    <system version="1">
      <cpu numaid="0" ...>                                                a NUMA node
        <pci busid="0000:10:00.0" class="0x060400" ...>                   a PCIe switch
          <pci busid="0000:11:00.0" class="0x030200" ...>
            <gpu dev="0" sm="90" rank="0">                                dev: its number, as in nvidia-smi
              <nvlink target="0000:05:00.0" count="4" tclass="0x068000"/>   to an NVSwitch, or to a GPU by its busid

`placement.py` keeps groups of GPUs within these domains. A network card stands under the PCIe switch of its GPUs, so
GPUs that share a switch share its card, too. The file does not say which node it describes, nor which leaf switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from dhelix.passes.sharding.factors import ShardingError

_NVSWITCH = "0x068000"  # the PCI class of NVSwitches


@dataclass(frozen=True)
class Gpu:
    """A GPU of a node.

    Attributes:
      number: its number in the node.
      island: number of the first GPU that NVLink joins with it, which may be itself.
      cpu: the NUMA node whose CPU it is attached to.
      switches: bus IDs of the PCIe switches above it, that of the CPU first.
    """

    number: int
    island: int
    cpu: str
    switches: tuple[str, ...]


@dataclass(frozen=True)
class NodeTopology:
    """The GPUs of one node, in the order of their numbers 0, 1, ..."""

    gpus: tuple[Gpu, ...]

    @property
    def domains(self) -> Mapping[int, tuple[str, ...]]:
        """What each GPU is part of, for `placement.place`: a CPU, NVLink within it, and PCIe switches.

        NVLink that joins GPUs of several CPUs comes first.
        """
        cpus: dict[int, set[str]] = {}
        for gpu in self.gpus:
            cpus.setdefault(gpu.island, set()).add(gpu.cpu)
        wide = {island for island, found in cpus.items() if len(found) > 1}
        return {
            gpu.number: (
                f"NVLink {gpu.island}" if gpu.island in wide else gpu.cpu,
                gpu.cpu,
                str(gpu.island),
                *gpu.switches,
            )
            for gpu in self.gpus
        }

    @property
    def joined(self) -> bool:
        """Whether NVLink joins all GPUs, so that any order of them is as good."""
        return len({gpu.island for gpu in self.gpus}) == 1

    def parts(self, numbers: list[int]) -> Mapping[str, int]:
        """Into how many parts slow links split a group of GPUs, by the name of the kind of link."""
        group = [self.gpus[number] for number in numbers]
        found = {}
        if len({gpu.cpu for gpu in self.gpus}) > 1 and not self.joined:
            found["between CPUs"] = _components([(f"island {gpu.island}", gpu.cpu) for gpu in group])
        if len(self.gpus) > len({gpu.island for gpu in self.gpus}) > 1:
            found["outside of NVLink"] = len({gpu.island for gpu in group})
        return found

    @classmethod
    def load(cls, path: str | Path) -> NodeTopology:
        """Reads a dump of NCCL.

        Raises:
          ShardingError: the file cannot be read, or is no dump of one node. The message says what is wrong.
        """
        try:
            return cls.of(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ShardingError(f"{path}: cannot be read ({error.strerror}): check the path") from None
        except UnicodeDecodeError:
            raise ShardingError(f"{path}: not a text file, so no dump of NCCL: check the path") from None

    @classmethod
    def of(cls, text: str, origin: str = "dump") -> NodeTopology:
        """The topology in the text of a dump. Raises ShardingError if it is none."""
        again = "write it again with NCCL_TOPO_DUMP_FILE"
        if "<!DOCTYPE" in text:
            raise ShardingError(f"{origin}: NCCL's dumps declare no document type; {again}")
        try:
            root = ElementTree.fromstring(text)
        except ElementTree.ParseError as error:
            raise ShardingError(f"{origin}: no XML ({error}); {again}") from None
        if root.tag != "system":
            raise ShardingError(f"{origin}: expected <system>, as in NCCL's dumps, not <{root.tag}>; {again}")
        hosts = {cpu.get("host_hash", "") for cpu in root.iter("cpu")}
        if len(hosts) > 1:
            raise ShardingError(
                f"{origin}: describes {len(hosts)} hosts, but one node is needed; dump a job of one node"
            )
        found = [each for cpu in root.iter("cpu") for each in _gpus(cpu, ())]
        numbers = [_number(gpu, origin) for _, _, gpu in found]
        if sorted(numbers) != list(range(len(numbers))) or not numbers:
            have = ", ".join(map(str, sorted(numbers))) or "none"
            raise ShardingError(
                f"{origin}: expected GPUs with dev 0, 1, ..., but it has {have}; dump a job on all GPUs"
            )
        of_bus = {path[-1]: number for (_, path, _), number in zip(found, numbers, strict=True) if path}
        islands = _islands({number: _links(gpu) for (_, _, gpu), number in zip(found, numbers, strict=True)}, of_bus)
        rows = zip(found, numbers, strict=True)
        gpus = (Gpu(number, islands[number], cpu, path[:-1]) for (cpu, path, _), number in rows)
        return cls(tuple(sorted(gpus, key=lambda gpu: gpu.number)))


type _Found = tuple[str, tuple[str, ...], Element]
"""A GPU: its CPU, the bus IDs from the CPU to the GPU's own, and its element."""


def _gpus(parent: Element, path: tuple[str, ...], cpu: str = "") -> Iterator[_Found]:
    cpu = parent.get("numaid", "") if parent.tag == "cpu" else cpu
    for child in parent:
        if child.tag == "gpu":
            yield cpu, path, child
        elif child.tag == "pci":
            yield from _gpus(child, (*path, child.get("busid", "").lower()), cpu)


def _number(gpu: Element, origin: str) -> int:
    text = gpu.get("dev", "")
    if not text.isdecimal():
        raise ShardingError(f"{origin}: a GPU has dev={text!r}, which is no number; correct it")
    return int(text)


def _links(gpu: Element) -> list[str]:
    """What NVLink joins a GPU with: bus IDs of GPUs, or the class of NVSwitches."""
    links = list(gpu.iter("nvlink"))
    return [_NVSWITCH if link.get("tclass") == _NVSWITCH else link.get("target", "").lower() for link in links]


def _islands(links: Mapping[int, list[str]], of_bus: Mapping[str, int]) -> dict[int, int]:
    """For each GPU, the first GPU that NVLink joins with it. GPUs that the dump lacks join nothing."""
    first = {number: number for number in links}
    for number, targets in sorted(links.items()):
        for target in targets:
            switched = next(n for n in sorted(links) if _NVSWITCH in links[n]) if target == _NVSWITCH else None
            other = of_bus.get(target) if switched is None else switched
            if other is not None:
                low, high = sorted((first[number], first[other]))
                first = {n: low if island == high else island for n, island in first.items()}
    return first


def _components(shared: list[tuple[str, str]]) -> int:
    """The number of parts of a group, in which members with a domain in common belong together."""
    parts: list[set[str]] = []
    for domains in map(set, shared):
        touched = [part for part in parts if part & domains]
        parts = [part for part in parts if not part & domains] + [domains.union(*touched)]
    return len(parts)
