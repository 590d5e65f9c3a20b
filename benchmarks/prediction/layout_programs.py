"""The programs of `layouts.py`: layouts of one batch on two H200s, each in one or two ways to run it, and the clusters.

    chosen("llama-8b, TP 2")[0].options()     # the options of `dhelix train` and `dhelix simulate`
    cluster, model = costs_of("no-p2p")

No result file had these steps when they were predicted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SETTINGS = {"nvlink": "default", "no-p2p": "no_p2p_small_buffers"}
"""The launch setting of each link, in `strands/variants.py`."""
CLUSTERS: Mapping[str, Mapping[str, Any]] = {
    "nvlink": {"name": "two-h200", "gpu": "H200", "nodes": 1, "gpus_per_node": 2, "link": "nvlink"},
    "no-p2p": {
        "name": "two-h200-no-p2p", "gpu": "H200", "nodes": 1, "gpus_per_node": 2, "link": "no-p2p",
        "constants": {"inside_gb_per_second": {"value": 27, "source": "profiles/hardware.py, H200-no-p2p"}},
    },
}  # fmt: skip
"""The cluster of each link, as a file for `dhelix simulate --cluster` says it."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-8b": {"preset": "llama-8b", "layers": 4, "seq": 8192, "vocab": 32_000, "batch": 8},
    "phi-2": {"preset": "phi-2", "layers": 4, "seq": 4096, "batch": 8},
}
TINY = {"llama-8b": "llama-demo", "phi-2": "gpt-demo"}


@dataclass(frozen=True)
class Program:
    """A step on two GPUs, and the way to run it.

    Attributes:
      layout: its name in tables.
      given: fields of `Options` besides those of the model.
      system: a name in `passes/simulation/systems.py`.
    """

    model: str
    layout: str
    given: Mapping[str, Any]
    system: str

    @property
    def row(self) -> dict[str, Any]:
        """Its names in result files."""
        return {"model": self.model, "layout": self.layout, "system": self.system}

    def options(self, tiny: bool = False) -> Any:
        from dhelix.launch.train.options import Options

        shapes = {**MODELS[self.model], **({"preset": TINY[self.model], "seq": 128, "vocab": None} if tiny else {})}
        return Options(**shapes, **self.given)


def _programs() -> Iterator[Program]:
    """All programs, the most telling first."""
    ours, plain, both = ("strands",), ("xla",), ("xla", "strands")
    llama, phi = "llama-8b", "phi-2"
    listed = (
        (llama, "TP 2", {"mesh": "tp=2"}, 4, both),
        (llama, "DP 2", {"mesh": "dp=2"}, 4, plain),
        (llama, "CP 2", {"mesh": "cp=2,tp=1"}, 4, both),
        (llama, "PP 2, W", {"mesh": "dp=1,tp=1", "pp": 2, "pipeline": "w"}, 8, ours),
        (llama, "PP 2, 1F1B", {"mesh": "dp=1,tp=1", "pp": 2, "pipeline": "1f1b"}, 8, plain),
        (llama, "DP 2, ZeRO-3", {"mesh": "dp=2", "states": "zero3"}, 4, both),
        (llama, "DP 2, ZeRO-1", {"mesh": "dp=2", "states": "zero1"}, 4, plain),
        (phi, "TP 2", {"mesh": "tp=2"}, 4, both),
        (phi, "DP 2", {"mesh": "dp=2"}, 4, plain),
        (llama, "DP 2, ZeRO-2", {"mesh": "dp=2", "states": "zero2"}, 4, plain),
        (llama, "DP 2, FSDP", {"mesh": "dp=2", "sharding": "fsdp"}, 4, plain),
        (llama, "TP 2", {"mesh": "tp=2"}, 8, both),
        (llama, "PP 2, W", {"mesh": "dp=1,tp=1", "pp": 2, "pipeline": "w"}, 4, ours),
        (llama, "DP 2, ZeRO-3", {"mesh": "dp=2", "states": "zero3"}, 2, plain),
        (llama, "DP 2", {"mesh": "dp=2"}, 4, ours),
        (llama, "DP 2, ZeRO-1", {"mesh": "dp=2", "states": "zero1"}, 4, ours),
        (llama, "PP 2, W", {"mesh": "dp=1,tp=1", "pp": 2, "pipeline": "w"}, 8, plain),
        (phi, "DP 2", {"mesh": "dp=2"}, 4, ours),
    )
    for model, layout, given, microbatches, systems in listed:
        for system in systems:
            yield Program(model, f"{layout}, M {microbatches}", {**given, "microbatches": microbatches}, system)


PROGRAMS = tuple(_programs())


def chosen(only: str) -> list[Program]:
    """The programs whose names match a regular expression."""
    return [one for one in PROGRAMS if re.search(only, ", ".join(one.row.values()))]


def costs_of(link: str) -> tuple[Any, Any]:
    """The cluster of a link, and its costs as `dhelix simulate --setting` takes them."""
    from dhelix.benchmarks.strands import variants
    from dhelix.passes.simulation.cluster_costs import ClusterCosts
    from dhelix.profiles.clusters import cluster_file

    cluster = cluster_file.of_json(dict(CLUSTERS[link]), "benchmarks/prediction/layout_programs.py")
    return cluster, ClusterCosts.of(cluster, variants.SETTINGS[SETTINGS[link]].profiled)
