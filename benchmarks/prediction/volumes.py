"""Communication volumes of one step from model and mesh, and how table 1 of DHelix comes about (arXiv 2411.15871).

    python benchmarks/prediction/volumes.py        # the table for Llama-3.1-405B, printed and computed

Bytes that each GPU sends in one step, in bfloat16. s is the sequence, h the hidden size, M the number of micro-batches:

    tensor parallelism     8 (tp-1)/tp s/cp h        each layer and micro-batch: 4 all-gathers, 4 reduce-scatters
    context parallelism    3 (cp-1) s/cp kv/tp       the same: keys and values around a ring, forward once and backward
                                                     with their gradients
    pipeline               2 (pp-1)/pp s/cp h/tp     each micro-batch, averaged over stages
    data parallelism       (n-1)/n parameters        once, for n = dp cp: a reduce-scatter of gradients

Table 1 prints GiB as GB, counts keys and values of all 128 heads (the model has 8), and in its last column does not
divide the sequence by CP for tensor parallelism and the pipeline. With these three changes (`as_printed`), all six
volumes follow to the printed digit.
"""

from __future__ import annotations

import dataclasses

from dhelix.models import preset
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.profiles.papers import clusters

BYTES = 2  # bfloat16


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """Degrees of parallelism, and the work of one replica in a step.

    Attributes:
      microbatches: micro-batches of one sequence each.
      seq: tokens of a sequence, over all devices of a `cp` group.
    """

    dp: int
    tp: int
    pp: int
    microbatches: int
    seq: int
    cp: int = 1


TABLE_1 = {
    "DP 64, TP 8, PP 16": Parallelism(64, 8, 16, 32, 8192),
    "DP 128, TP 8, PP 16": Parallelism(128, 8, 16, 16, 8192),
    "DP 8, TP 8, PP 16, CP 16": Parallelism(8, 8, 16, 16, 131_072, 16),
}
"""The columns, by their name in `profiles.papers.published`. Sequences and batches are those of the Llama 3 report."""


def volumes(config: DecoderConfig, mesh: Parallelism, as_printed: bool = False) -> dict[str, float]:
    """Bytes that a GPU sends in one step, by kind of parallelism.

    Args:
      as_printed: as table 1 of DHelix counts them.
    """
    kv_heads = config.heads if as_printed else config.kv_heads
    tokens = mesh.seq / mesh.cp
    counted = mesh.seq if as_printed else tokens
    layers = mesh.microbatches * config.layers / mesh.pp
    keys_and_values = 2 * tokens * kv_heads * config.head_dim / mesh.tp
    replicas = mesh.dp * mesh.cp
    parameters = dataclasses.replace(config, kv_heads=kv_heads).parameter_count / (mesh.tp * mesh.pp)
    elements = {
        "tensor": 8 * (mesh.tp - 1) / mesh.tp * counted * config.hidden * layers,
        "context": 3 * (mesh.cp - 1) * keys_and_values * layers,
        "pipeline": 2 * (mesh.pp - 1) / mesh.pp * counted * config.hidden / mesh.tp * mesh.microbatches,
        "data": (replicas - 1) / replicas * parameters,
    }
    return {kind: BYTES * count for kind, count in elements.items()}


def local_and_across(found: dict[str, float]) -> tuple[float, float]:
    """The volume inside a node (tensor parallelism) and the volume between nodes (all other kinds)."""
    return found["tensor"], sum(volume for kind, volume in found.items() if kind != "tensor")


def table_1() -> list[dict[str, str | float]]:
    """Table 1 as it is printed, counted as it is printed, and without its three changes; in GiB."""
    config, printed = preset("llama-3.1-405b"), clusters.get("dhelix-h100-16384").numbers
    rows = list[dict[str, str | float]]()
    for name, mesh in TABLE_1.items():
        counted, computed = (local_and_across(volumes(config, mesh, how)) for how in (True, False))
        for place, kind in enumerate(("local communication", "cross-node communication")):
            found = next(
                one.value for one in printed
                if one.workload.endswith(f"GPUs, {name}") and one.quantity == kind and one.unit == "GB"
            )  # fmt: skip
            rows.append({
                "mesh": name, "what": kind, "published": found, "counted as there": round(counted[place] / 2**30, 1),
                "computed": round(computed[place] / 2**30, 1),
            })  # fmt: skip
    return rows


def main() -> None:
    for row in table_1():
        print(row)


if __name__ == "__main__":
    main()
