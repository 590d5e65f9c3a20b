"""The clusters that have a name: the shipped files, and those of the papers.

known.find("h100-infiniband")        # profiles/data/clusters/h100-infiniband.json
known.find("dhelix-a800")            # profiles/papers/clusters.py
known.find("our-cluster.json")       # a file
"""

from __future__ import annotations

from pathlib import Path

from dhelix.profiles.clusters import cluster_file
from dhelix.profiles.clusters.cluster import Cluster
from dhelix.profiles.clusters.constants import ClusterError
from dhelix.profiles.hardware import GPUS
from dhelix.profiles.papers import clusters as papers

_SHIPPED = Path(__file__).parents[1] / "data" / "clusters"


def names() -> list[str]:
    """The names that `find` knows."""
    return sorted({path.stem for path in _SHIPPED.glob("*.json")} | set(papers.ALL))


def find(name: str) -> Cluster:
    """The cluster with this name, or of the file with this path.

    Raises:
      ClusterError: the name is unknown, or the file describes no cluster.
    """
    shipped = _SHIPPED / f"{name}.json"
    if "/" not in name and shipped.is_file():
        return cluster_file.read(shipped)
    if name in papers.ALL:
        return of_paper(papers.ALL[name])
    if name.endswith(".json") or "/" in name:
        return cluster_file.read(name)
    raise ClusterError(f"cluster {name!r} is unknown; give a JSON file, or one of {', '.join(names())}")


def of_paper(paper: papers.Cluster) -> Cluster:
    """A paper's cluster. Its constants are guesses of `profiles/hardware.py`, unless the paper measured them."""
    gpu = max((gpu for gpu in GPUS if paper.hardware.name.startswith(gpu)), key=len)
    return Cluster(
        paper.name, gpu, paper.nodes, paper.hardware, inside=paper.link, between=paper.network, notes=paper.notes
    )
