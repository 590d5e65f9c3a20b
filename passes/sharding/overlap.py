"""What of a step's collectives stays exposed: the overlap of AMSP section V-C.

    collective                   runs beside
    all-gather, forward          compute of the layer before; the first layer's has nothing before it
    all-gather, backward         the weight gradient of the module before; with recomputation, the layer before
    reduce-scatter               compute of what follows, in one stream with the all-gathers
    all-reduce                   the rest of its micro-batch's backward, bucket by bucket, in a stream of its own
    broadcast                    the next step's forward, in its order

Two things that run at once proceed at their rates (`profiles/estimates/contention.py`). "Exposed" is how much longer
the step becomes, so it includes how much a hidden collective slows compute. The paper has no such slow-down. While
gathers and reduce-scatters use the links between nodes, an all-reduce or a broadcast between nodes waits, and the same
holds inside nodes. The default rates are those that `profiles/hardware.py` has between nodes. `Overlap.on` takes a
GPU's own rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dhelix.passes.sharding.factors import ShardingError
from dhelix.profiles.estimates.contention import ContentionModel, pair_seconds
from dhelix.profiles.hardware import Hardware
from dhelix.profiles.profile import Section

type Rates = tuple[float, float]
type Modules = tuple[Sequence[float], Sequence[float]]
"""Times of the modules of a layer, and of those outside of layers."""

_SWITCHES = ("gather", "reduce_scatter", "all_reduce", "broadcast")


@dataclass(frozen=True)
class Overlap:
    """Which collectives run beside compute.

    Attributes:
      gather, reduce_scatter, all_reduce, broadcast: whether they do.
      within: rates of compute and of a collective inside a node that run at once; 1 is the speed alone.
      between: the same for a collective between nodes.
    """

    gather: bool = True
    reduce_scatter: bool = True
    all_reduce: bool = True
    broadcast: bool = True
    within: Rates = (0.9, 0.95)
    between: Rates = (0.9, 0.95)

    @classmethod
    def only(cls, *names: str) -> Overlap:
        """Overlap of these collectives alone, by the names of the switches.

        Raises:
          ShardingError: a name is unknown.
        """
        if wrong := sorted(set(names) - set(_SWITCHES)):
            raise ShardingError(f"overlap of {wrong[0]!r} is unknown; use {', '.join(_SWITCHES)}")
        gather, reduce_scatter, all_reduce, broadcast = (name in names for name in _SWITCHES)
        return cls(gather, reduce_scatter, all_reduce, broadcast)

    def on(self, hardware: Hardware, section: Section | None = None) -> Overlap:
        """The same switches, with the rates of a GPU.

        Args:
          section: measured pairs of the GPU. Without such pairs, the rates are those in `hardware`.
        """
        measured = ContentionModel.fit(section, hardware) if section else None

        def rates(across: bool) -> Rates:
            return (measured.typical(across) if measured else None) or hardware.rates(across)

        return replace(self, within=rates(False), between=rates(True))

    def rates(self, across: bool) -> Rates:
        """The rates for a group that spans nodes, or does not."""
        return self.between if across else self.within


DEEPSPEED = Overlap.only("gather")
"""Reduce-scatters are exposed, and all-reduces block: what AMSP VI-C sees in traces of DeepSpeed."""

NOTHING = Overlap.only()
"""No collective runs beside compute."""


@dataclass(frozen=True)
class Stretch:
    """Compute times of a step's forward, in seconds for one micro-batch.

    Attributes:
      modules: of each module of a layer, in forward order.
      outside: of each module outside of layers: the first comes before the layers, the others after them.
      layers, microbatches: their numbers.
      recompute: whether backward computes the forward of each layer again.
    """

    modules: Sequence[float]
    outside: Sequence[float]
    layers: int
    microbatches: int
    recompute: bool

    @property
    def layer(self) -> float:
        """Forward of a layer."""
        return sum(self.modules)


def longer(compute: float, collective: float, rates: Rates) -> float:
    """How much longer `compute` takes if a collective runs beside it, both in seconds alone."""
    if collective <= 0.0:
        return 0.0
    return pair_seconds(compute, collective, rates)[0] - compute


def forward_gathers(
    stretch: Stretch, inside: Sequence[float], outside: Sequence[float], overlap: Overlap, across: bool
) -> float:
    """Exposed seconds of all forward gathers of a step."""
    layer, rates = sum(inside), overlap.rates(across)
    if not overlap.gather:
        return stretch.microbatches * (stretch.layers * layer + sum(outside))
    hidden = (stretch.layers - 1) * longer(stretch.layer, layer, rates)
    hidden += longer(stretch.layer, sum(outside[1:]), rates)
    return stretch.microbatches * (sum(outside[:1]) + layer + hidden)


def backward(
    stretch: Stretch, gathers: Modules, scatters: Modules, overlap: Overlap, across: bool
) -> tuple[float, float]:
    """Exposed seconds of all backward gathers and of all reduce-scatters of a step."""
    layer, rates = sum(gathers[0]), overlap.rates(across)
    scatter, m = sum(scatters[0]), stretch.microbatches
    compute = (3.0 if stretch.recompute else 2.0) * stretch.layer
    if overlap.gather:
        gather = _next_modules(stretch, gathers[0], rates) if not stretch.recompute else longer(compute, layer, rates)
        ends = sum(longer(time, one, rates) for time, one in zip(stretch.outside[1:], gathers[1][1:], strict=True))
        ends += sum(longer(stretch.modules[0], one, rates) for one in gathers[1][:1])
    else:
        gather, ends = layer, sum(gathers[1])
    if overlap.reduce_scatter:
        both = longer(compute, (layer if overlap.gather else 0.0) + scatter, rates)
        more = max(both - (gather if overlap.gather else 0.0), 0.0)
        tail = sum(scatters[1][:1])  # the embedding's, after which the last micro-batch has nothing more to compute
        after = longer(compute, sum(scatters[1][1:]), rates)
    else:
        more, tail, after = scatter, m * sum(scatters[1][:1]), sum(scatters[1][1:])
    return m * (stretch.layers * gather + ends), m * (stretch.layers * more + after) + tail


def _next_modules(stretch: Stretch, gathers: Sequence[float], rates: Rates) -> float:
    """Exposed seconds of a layer's backward gathers: each one runs under the weight gradient of the module before."""
    after = [
        *stretch.modules[1:],
        stretch.modules[0],
    ]  # backward comes from the module after, or the next layer's first
    return sum(longer(time, one, rates) for time, one in zip(after, gathers, strict=True))


def paired(compute: float, collectives: float, overlap: Overlap, across: bool) -> float:
    """Exposed seconds of a micro-batch's collectives, if another micro-batch computes at the same time (two strands).

    Args:
      compute: forward and backward of a micro-batch.
      collectives: all that is gathered and reduce-scattered for it.
    """
    return longer(compute, collectives, overlap.rates(across))


def all_reduce(
    backward: float, buckets: int, one: float, overlap: Overlap, across: bool, busy: float = 0.0, early: bool = False
) -> float:
    """Exposed seconds of the all-reduces of one micro-batch.

    The first bucket is full after its share of backward, and the last one only when backward ends.

    Args:
      backward: compute time of the micro-batch's backward.
      buckets: number of buckets; `one` is the time of one.
      busy: seconds for which other collectives use the same links meanwhile.
      early: whether backward makes these gradients first, as those of a head, so that the last bucket hides, too.
    """
    if early and overlap.all_reduce:
        return longer(max(backward - busy, 0.0), buckets * one, overlap.rates(across))
    if not overlap.all_reduce or buckets < 2:
        return buckets * one
    window = max(backward * (1.0 - 1.0 / buckets) - busy, 0.0)
    return longer(window, (buckets - 1) * one, overlap.rates(across)) + one


def broadcast(forward: float, first: float, seconds: float, overlap: Overlap, across: bool, busy: float = 0.0) -> float:
    """Exposed seconds of the broadcast of updated parameters.

    Args:
      forward: compute time of the next step's first forward.
      first: share of the parameters that this forward needs at once: the embedding and the first layer.
      seconds: time of the broadcast alone.
      busy: seconds for which gathers use the same links meanwhile.
    """
    if not overlap.broadcast:
        return seconds
    window = max(forward - busy, 0.0)
    return first * seconds + longer(window, (1.0 - first) * seconds, overlap.rates(across))
