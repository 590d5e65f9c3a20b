"""Collective matmuls as data: where one stands (Site), how it can be executed (Form), and which way to choose.

    rows    = global M, leading batch dimensions folded in
    kind                    operands on one device of n            result on one device
    all_gather_matmul       x [rows / n, K]    w [K, columns]      [rows, columns]        gather x, multiply
    matmul_reduce_scatter   x [rows, K]        w [K, columns]      [rows / n, columns]    multiply, sum and scatter
    matmul_all_reduce       x [rows, K]        w [K, columns]      [rows, columns]        multiply, sum

A Site and a Form have a `key`, one line of text that JSON files and log lines use, and `parse` reads it back:

    Site("all_gather_matmul", 8192, 4096, 1536, "bfloat16", 4).key
        all_gather_matmul bfloat16 8192x4096x1536 over 4
    Form("hybrid", chunks=4).key                                        hybrid:4
    Form("mosaic", tiles=Tiles(128, 256, 64, 4, "N", 8, 132)).key       mosaic:128x256x64,steps=4,wide=N,group=8,sms=132
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self

from dhelix.errors import DhelixError

KINDS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
FORMS = ("monolithic", "ring", "bidirectional_ring", "hybrid", "mosaic")

_SITE_KEY = re.compile(r"(\w+) (\w+) (\d+)x(\d+)x(\d+) over (\d+)", re.ASCII)
_TILES_KEY = re.compile(r"(\d+)x(\d+)x(\d+),steps=(\d+),wide=([MN]),group=(\d+)(?:,sms=(\d+))?", re.ASCII)


@dataclass(frozen=True, order=True)
class Site:
    """One collective matmul of a program; what decides how long each form of it takes, besides the link.

    Attributes:
      kind: one of KINDS.
      rows: global M, leading batch dimensions folded in.
      contraction: K of the GEMM on this device.
      columns: N of the GEMM on this device, summed over weights that share a gather.
      dtype: of operands and result, such as "bfloat16".
      axis_size: devices on the mesh axis of the collective.
    Sizes may be 0 (an empty batch); nothing is measured of such a site.
    """

    kind: str
    rows: int
    contraction: int
    columns: int
    dtype: str
    axis_size: int

    def __post_init__(self) -> None:
        _one_of("kind of collective matmul", self.kind, KINDS)
        for name in ("rows", "contraction", "columns"):
            _at_least(0, f"{name} of a collective matmul", getattr(self, name))
        _at_least(1, "axis_size of a collective matmul", self.axis_size)
        if not isinstance(self.dtype, str) or not re.fullmatch(r"\w+", self.dtype):
            raise DhelixError(
                f'dtype of a collective matmul is {str(self.dtype)[:80]!r}: give its name, such as "bfloat16"'
            )

    @property
    def key(self) -> str:
        return f"{self.kind} {self.dtype} {self.rows}x{self.contraction}x{self.columns} over {self.axis_size}"

    @classmethod
    def parse(cls, key: str) -> Self:
        """The site that has this key. Raises DhelixError for any other text."""
        match = _SITE_KEY.fullmatch(key)
        if not match:
            raise DhelixError(f"{key[:120]!r} is no collective matmul: write `kind dtype MxKxN over axis_size`")
        kind, dtype, *sizes, axis_size = match.groups()
        rows, contraction, columns = map(int, sizes)
        return cls(kind, rows, contraction, columns, dtype, int(axis_size))


@dataclass(frozen=True)
class Tiles:
    """How a Mosaic-GPU kernel cuts its GEMM.

    Attributes:
      tile_m, tile_n, tile_k: rows, columns and depth of the tile that one step multiplies, per block of threads.
      steps: depth of the pipeline, operand tiles in flight in shared memory.
      wide: "M" or "N", along which the tiles of both consumer warpgroups lie side by side.
      group: width in tiles of the bands in which the grid is walked, so that neighbours share operands in L2.
      sms: streaming multiprocessors that the kernel takes; None is all of them.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    steps: int
    wide: Literal["M", "N"]
    group: int
    sms: int | None = None

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k", "steps", "group"):
            _at_least(1, f"{name} of Tiles", getattr(self, name))
        if self.sms is not None:
            _at_least(1, "sms of Tiles", self.sms)
        _one_of("wide of Tiles", self.wide, ("M", "N"))

    @property
    def key(self) -> str:
        sms = "" if self.sms is None else f",sms={self.sms}"
        return f"{self.tile_m}x{self.tile_n}x{self.tile_k},steps={self.steps},wide={self.wide},group={self.group}{sms}"

    @classmethod
    def parse(cls, key: str) -> Self:
        """The tiles that have this key. Raises DhelixError for any other text."""
        match = _TILES_KEY.fullmatch(key)
        if not match:
            raise DhelixError(f"{key[:120]!r} are no tiles: write `128x128x64,steps=4,wide=M,group=8[,sms=132]`")
        m, n, k, steps, wide, group, sms = match.groups()
        return cls(
            int(m), int(n), int(k), int(steps), "M" if wide == "M" else "N", int(group), int(sms) if sms else None
        )


@dataclass(frozen=True)
class Form:
    """A way to execute a collective matmul.

    Attributes:
      name: one of FORMS.
      chunks: of "hybrid", pieces that the rows are cut into; 1 for the others.
      tiles: of "mosaic", None for the kernel's own; None for the others.
    """

    name: str
    chunks: int = 1
    tiles: Tiles | None = None

    def __post_init__(self) -> None:
        _one_of("form of a collective matmul", self.name, FORMS)
        _at_least(1, "chunks of a Form", self.chunks)
        if self.chunks != 1 and self.name != "hybrid":
            raise DhelixError(f'form "{self.name}" has no chunks, not {self.chunks}: leave them out, or take "hybrid"')
        if self.tiles is not None and self.name != "mosaic":
            raise DhelixError(f'form "{self.name}" has no tiles: leave them out, or take "mosaic"')

    @property
    def key(self) -> str:
        if self.name == "hybrid":
            return f"hybrid:{self.chunks}"
        return self.name if self.tiles is None else f"{self.name}:{self.tiles.key}"

    @property
    def order(self) -> tuple[int, int, str]:
        """To sort by: as FORMS lists them, then by chunks, then by tiles."""
        return FORMS.index(self.name), self.chunks, self.key

    @classmethod
    def parse(cls, key: str) -> Self:
        """The form that has this key. Raises DhelixError for any other text."""
        name, _, rest = key.partition(":")
        if name == "hybrid" and rest.isdecimal():
            return cls(name, chunks=int(rest))
        return cls(name, tiles=Tiles.parse(rest)) if rest else cls(name)


def _one_of(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise DhelixError(f"{what} is {str(value)[:80]!r}: must be one of {', '.join(known)}")


def _at_least(least: int, what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DhelixError(f"{what} is {str(value)[:80]!r}: must be a whole number of at least {least}")


MONOLITHIC = Form("monolithic")
