"""Models, devices and links that the tests of sharding share."""

from __future__ import annotations

from dataclasses import replace

from dhelix.passes.sharding.collective_times import Links, LinkTimes
from dhelix.passes.sharding.factors import Factor, Factors
from dhelix.passes.sharding.sizes import MIXED, Batch, ModelSizes, StateBytes, decoder
from dhelix.passes.sharding.step_times import Compute, Job

GPU = Compute(flops=200e12, memory_bandwidth=1.6e12)
LINKS = Links(within=150e9, between=80e9)
TIMES = LinkTimes(LINKS)


def llama(layers: int = 32, hidden: int = 4096, ffn: int = 11_008, name: str = "llama") -> ModelSizes:
    return decoder(
        name,
        layers=layers,
        hidden=hidden,
        vocabulary=32_000,
        attention=4 * hidden * hidden + hidden,
        feed_forward=3 * hidden * ffn + hidden,
        score_width=hidden,
        sequence=4096,
    )


LLAMA_7B = llama()
LLAMA_30B = llama(60, 6144, 16_384)


def job(sizes: ModelSizes = LLAMA_7B, batch: Batch | None = None, kept: StateBytes = MIXED, **more: object) -> Job:
    return Job(sizes, batch or Batch(), GPU, kept, **more)  # type: ignore[arg-type]


def factors(mesh: tuple[int, int], p: tuple[int, int], g: tuple[int, int], o: tuple[int, int]) -> Factors:
    return Factors(Factor(*mesh), Factor(*p), Factor(*g), Factor(*o))


def with_rows(sizes: ModelSizes, rows: int = 32_000) -> ModelSizes:
    """The model under automatic sharding, where XLA may exchange rows of the embedding."""
    embedding, *others = sizes.outside
    return replace(sizes, outside=(replace(embedding, rows=rows), *others))
