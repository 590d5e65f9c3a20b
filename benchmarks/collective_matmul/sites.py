"""The measured collective matmuls, by importance: layers of Llama-8B and Llama-70B, and DistFuse's table 1.

Shapes on one device, for a tensor-parallel axis of n devices, hidden size H, FFN width F, and Q columns of q + k + v:

    forward     all_gather_matmul       qkv       K = H         N = Q / n          sequence sharded before, heads after
                                        gate up   K = H         N = 2 F / n
                matmul_reduce_scatter   out       K = H / n     N = H              (or matmul_all_reduce, no sequence
                                        down      K = F / n     N = H               parallelism: inference, DistFuse)
    backward    all_gather_matmul       out', down'             gradients of the inputs: K and N change places
                matmul_reduce_scatter   qkv', gate up'

DistFuse's table 1 (M 1024, N 8192, global K 8192 and 28672) is `out` and `down` of Llama-70B as matmul_all_reduce.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import KINDS, Site

GATHER, SCATTER, REDUCE = KINDS
ROWS = (8192, 4096, 16384, 2048)
"""Numbers of tokens, by importance."""
DISTFUSE_ROWS = 1024


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    ffn: int
    qkv: int


MODELS = (Model("llama-8b", 4096, 14336, 6144), Model("llama-70b", 8192, 28672, 10240))
_SIZES = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Shape:
    """A layer's weight on one device. Priority 0 is measured first."""

    name: str
    kind: str
    contraction: int
    columns: int
    priority: int


def shapes(n: int) -> list[Shape]:
    """All shapes for an axis of n devices, priority 0 first."""
    found = []
    for m in MODELS:
        forward = {
            "qkv": (GATHER, m.hidden, m.qkv // n),
            "gate up": (GATHER, m.hidden, 2 * m.ffn // n),
            "out": (SCATTER, m.hidden // n, m.hidden),
            "down": (SCATTER, m.ffn // n, m.hidden),
        }
        for layer, (kind, contraction, columns) in forward.items():
            other = SCATTER if kind == GATHER else GATHER
            found.append(Shape(f"{m.name} {layer}", kind, contraction, columns, 0))
            found.append(Shape(f"{m.name} {layer}'", other, columns, contraction, 1))
            if kind == SCATTER:
                found.append(Shape(f"{m.name} {layer}", REDUCE, contraction, columns, 2))
    return sorted(found, key=lambda shape: shape.priority)


def is_backward(name: str) -> bool:
    """Whether `name` is the name of a gradient's shape."""
    return name.endswith("'")


def sites(
    n: int,
    dtype: str = "bfloat16",
    kinds: Sequence[str] = KINDS,
    wanted: Sequence[str] = (),
    rows: Sequence[int] = (),
) -> list[tuple[str, Site]]:
    """Names and sites, the most important first; each site once.

    Args:
      n: devices of the axis.
      wanted: parts of names ("llama-8b", "down"), or sizes on one device as MxKxN, which give a site of every kind. All
        names if empty.
      rows: numbers of tokens instead of ROWS. Without them, DistFuse's sites come first.

    Raises:
      DhelixError: no shape has such a name.
    """
    sizes = [match for match in map(_SIZES.fullmatch, wanted) if match]
    names = [name for name in wanted if not _SIZES.fullmatch(name)]
    found = [(m[0], Site(kind, int(m[1]), int(m[2]), int(m[3]), dtype, n)) for m in sizes for kind in kinds]
    if names or not sizes:
        named = [s for s in shapes(n) if s.kind in kinds and (not names or any(part in s.name for part in names))]
        if not named:
            known = ", ".join(dict.fromkeys(shape.name for shape in shapes(n)))
            raise DhelixError(f"no shape of {', '.join(kinds)} is named {', '.join(names)}: give parts of {known}")
        found += [(s.name, Site(s.kind, m, s.contraction, s.columns, dtype, n)) for m, s in _ordered(named, rows)]
    return [(name, site) for i, (name, site) in enumerate(found) if site not in (s for _, s in found[:i])]


def _ordered(named: Sequence[Shape], rows: Sequence[int]) -> Iterator[tuple[int, Shape]]:
    if not rows:
        large = MODELS[-1].name
        yield from ((DISTFUSE_ROWS, s) for s in named if s.kind == REDUCE and s.name.startswith(large))
    for priority in sorted({shape.priority for shape in named}):
        yield from ((m, shape) for m in rows or ROWS for shape in named if shape.priority == priority)
