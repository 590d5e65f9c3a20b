"""A made-up machine that gives times alone and in pairs. Its rules differ from those of the models under test.

- A collective takes SMs from a GEMM. The GEMM then needs more waves of tiles.
- Operators share memory bandwidth.
- A collective that is launched second waits until the first wave of blocks has left. One that is launched first does
  not wait.

All measurements have noise. Shapes are those of Llama-8B and 25B layers at TP 4, sequence 8192.
"""

import math
import random
from collections.abc import Sequence

from dhelix.profiles.estimates.interpolation import roofline_seconds
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Section, Timing

SMS = 132
BLOCKED = 0.9  # fraction of an operator's time in which a second operator cannot start


def gemm(m: int, n: int, k: int, layout: str = "nt", library: str = "cublaslt") -> OperatorKey:
    moved = 2 * (m * k + n * k + m * n)
    return OperatorKey("gemm", f"bf16,bf16->bf16:{layout}:{library}", (m, n, k), 2.0 * m * n * k, moved)


def attention(heads: int, backward: bool = False) -> OperatorKey:
    kind, products, tensors = ("attention-backward", 5, 10) if backward else ("attention", 2, 4)
    flops, moved = float(products * heads * 8192**2 * 128), tensors * 2 * 8192 * heads * 128
    return OperatorKey(kind, "bf16:causal:cudnn", (1, heads, 8192, 128), flops, moved)


def fusion(elements: int, name: str = "loop-multiply:1f0c") -> OperatorKey:
    return OperatorKey("fusion", name, (elements,), 0.0, 6 * elements)


def collective(kind: str, mib: int, gpus: int = 4, nodes: int = 1, groups: int = 1) -> CollectiveKey:
    return CollectiveKey(kind, mib << 20, gpus, nodes, groups)


OPERATORS = (
    gemm(8192, 1536, 4096),
    gemm(8192, 4096, 1024),
    gemm(8192, 7168, 4096),
    gemm(8192, 4096, 3584),
    gemm(8192, 4096, 7168, "nn"),
    gemm(4096, 7168, 8192, "tn"),
    gemm(1024, 4096, 8192, "tn"),
    gemm(8192, 2048, 5120),
    gemm(8192, 5120, 3456),
    gemm(5120, 3456, 8192, "tn"),
    attention(8),
    attention(8, backward=True),
    attention(16),
    fusion(8192 * 4096),
    fusion(2048 * 4096),
    fusion(8192 * 3584, "loop-add:77aa"),
)
COLLECTIVES = tuple(
    collective(kind, mib) for kind in ("all-gather", "reduce-scatter") for mib in (8, 16, 64, 80, 224, 448)
)


def section(
    seed: int = 0,
    noise: float = 0.02,
    operators: Sequence[OperatorKey] = OPERATORS,
    collectives: Sequence[CollectiveKey] = COLLECTIVES,
) -> Section:
    """Every operator with every collective in both launch orders, and some operators with each other."""
    rng = random.Random(seed)
    alone: dict[Key, float] = {key: _alone(key) * rng.uniform(0.93, 1.07) for key in (*operators, *collectives)}
    true = {
        PairKey(*pair): _race(*pair, alone)
        for o in operators
        for c in collectives
        for pair in ((o, c), (c, o))
    }  # fmt: skip
    true |= {PairKey(a, b): _race(a, b, alone) for a in operators[::2] for b in operators[1::2]}

    def observed(seconds: float) -> float:
        return seconds * math.exp(rng.gauss(0.0, noise))

    def timing(key: PairKey, first: float, second: float) -> PairTiming:
        first, second = observed(first), observed(second)
        return PairTiming(max(first, second), first, second, observed(alone[key.first]), observed(alone[key.second]))

    return Section(
        "default",
        {key: Timing(observed(alone[key]), samples=20) for key in operators},
        {key: Timing(observed(alone[key]), samples=20) for key in collectives},
        {key: timing(key, *ends) for key, ends in true.items()},
    )


def _alone(key: Key) -> float:
    seconds = roofline_seconds(key, H200)
    if isinstance(key, CollectiveKey):
        return seconds * (1.15 if key.kind == "reduce-scatter" else 1.0)
    if key.kind == "gemm":
        return seconds * 0.9 * math.ceil(_tiles(key) / SMS) / (_tiles(key) / SMS)
    return seconds


def _tiles(key: OperatorKey) -> int:
    return math.ceil(key.sizes[0] / 128) * math.ceil(key.sizes[1] / 256)


def _race(first: Key, second: Key, alone: dict[Key, float]) -> tuple[float, float]:
    """The ends of both sides. The second one starts after a delay. Then both run at their rates until one is done."""
    if isinstance(first, OperatorKey) and isinstance(second, OperatorKey):
        delay, rates = BLOCKED * alone[first], (0.6, 0.5)
    elif isinstance(first, OperatorKey) and isinstance(second, CollectiveKey):
        delay = alone[first] / _waves(first)
        rates = _compute_rate(first, alone[first], second), _communication_rate(first, alone[first])
    else:
        assert isinstance(first, CollectiveKey) and isinstance(second, OperatorKey)
        delay = 3e-6
        rates = min(1.0, 1.3 * _communication_rate(second, alone[second])), _compute_rate(second, alone[second], first)
    delay = min(delay, alone[first])
    left = alone[first] - delay, alone[second]
    both = min(left[0] / rates[0], left[1] / rates[1])
    first_end, second_end = (delay + both + work - rate * both for work, rate in zip(left, rates, strict=True))
    return first_end, second_end


def _waves(key: OperatorKey) -> int:
    if key.kind == "gemm":
        return max(math.ceil(_tiles(key) / SMS), 1)
    return 12 if key.kind.startswith("attention") else 30


def _compute_rate(key: OperatorKey, seconds: float, beside: CollectiveKey) -> float:
    taken = 16 if beside.kind == "all-gather" else 24
    sms = 1.0 - 0.8 * taken / SMS
    if key.kind == "gemm":
        sms = math.ceil(_tiles(key) / SMS) / math.ceil(_tiles(key) / (SMS - taken))
    return sms * (1.0 - 0.25 * _memory_share(key, seconds))


def _communication_rate(beside: OperatorKey, seconds: float) -> float:
    if beside.kind == "gemm":
        return 0.35 + 0.3 * math.exp(-seconds / 3e-4)
    base = 0.55 if beside.kind.startswith("attention") else 0.6
    return base + 0.25 * (1.0 - _memory_share(beside, seconds))


def _memory_share(key: OperatorKey, seconds: float) -> float:
    return key.bytes / seconds / H200.memory_bandwidth
