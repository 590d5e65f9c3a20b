"""Collective matmuls as data: where they are (Site), how they can be executed (Form), and which form to choose.

    rows    = global M, leading batch dimensions folded in
    kind                    operands on one device of n            result on one device
    all_gather_matmul       x [rows / n, K]    w [K, columns]      [rows, columns]        gather x, multiply
    matmul_reduce_scatter   x [rows, K]        w [K, columns]      [rows / n, columns]    multiply, sum and scatter
    matmul_all_reduce       x [rows, K]        w [K, columns]      [rows, columns]        multiply, sum

A Site and a Form have a `key`: one line of text for JSON files and log lines. `parse` reads it back:

    Site("all_gather_matmul", 8192, 4096, 1536, "bfloat16", 4).key
        all_gather_matmul bfloat16 8192x4096x1536 over 4
    Form("hybrid", chunks=4).key                                        hybrid:4
    Form("mosaic", tiles=Tiles(128, 256, 64, 4, "N", 8, 132)).key       mosaic:128x256x64,steps=4,wide=N,group=8,sms=132

`choose` takes a form only if it is known to pay. A measured site decides for itself. For a site between measured ones,
a form must win at each of the nearest sites that enclose it, in the logarithms of rows, contraction and columns:

    rows      4096      6144      8192       16384      32768
    ring      wins        ?       loses       wins         ?        6144: monolithic, as ring loses at 8192
    mosaic    wins        ?       wins        wins         ?        6144: mosaic; 32768: monolithic, nothing beyond

`Times` hold one kind of hardware and link; `times.py` reads their files. The choice is deterministic and costs one scan
of the measured sites.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

from dhelix.errors import DhelixError
from dhelix.profiles.profile import Provenance, Timing

KINDS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
FORMS = ("monolithic", "ring", "bidirectional_ring", "hybrid", "mosaic")

MARGIN = 0.02
"""Fraction of the monolithic form's time that another form must save. It must also save more than both spreads."""

H200_SMS = 132
"""Streaming multiprocessors of an H100 SXM or H200; a kernel takes all of them if its tiles give no number."""

REACH = 4.0
"""A measured site counts as a neighbour if each of its sizes is within this factor."""

_SITE_KEY = re.compile(r"(\w+) (\w+) (\d+)x(\d+)x(\d+) over (\d+)", re.ASCII)
_TILES_OPTIONS = ("sms", "chunks", "cluster", "lead", "splits")
_TILES_KEY = re.compile(
    r"(\d+)x(\d+)x(\d+),steps=(\d+),wide=([MN]),group=(\d+)"
    + "".join(rf"(?:,{name}=(\d+))?" for name in _TILES_OPTIONS),
    re.ASCII,
)


def _one_of(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise DhelixError(f"{what} is {str(value)[:80]!r}: must be one of {', '.join(known)}")


def _at_least(least: int, what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DhelixError(f"{what} is {str(value)[:80]!r}: must be a whole number of at least {least}")


@dataclass(frozen=True, order=True)
class Site:
    """One collective matmul of a program. Together with the link, it decides how long each form takes.

    Attributes:
      kind: one of KINDS.
      rows: global M, leading batch dimensions folded in.
      contraction: K of the GEMM on this device.
      columns: N of the GEMM on this device, summed over weights that share a gather.
      dtype: of operands and result, such as "bfloat16".
      axis_size: devices on the mesh axis of the collective.
    Sizes may be 0 (an empty batch); such a site is never measured.
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
    def sizes(self) -> tuple[int, int, int]:
        return self.rows, self.contraction, self.columns

    @property
    def family(self) -> tuple[str, str, int]:
        """What two sites must share so that times of one say something about the other."""
        return self.kind, self.dtype, self.axis_size

    @property
    def key(self) -> str:
        return f"{self.kind} {self.dtype} {self.rows}x{self.contraction}x{self.columns} over {self.axis_size}"

    @classmethod
    def parse(cls, key: str) -> Self:
        """The site that has this key.

        Raises:
          DhelixError: the text is no key of a site.
        """
        match = _SITE_KEY.fullmatch(key)
        if not match:
            raise DhelixError(f"{key[:120]!r} is not a collective matmul: write `kind dtype MxKxN over axis_size`")
        kind, dtype, *sizes, axis_size = match.groups()
        rows, contraction, columns = map(int, sizes)
        return cls(kind, rows, contraction, columns, dtype, int(axis_size))


@dataclass(frozen=True)
class Tiles:
    """How a Mosaic-GPU kernel tiles its GEMM.

    Attributes:
      tile_m, tile_n, tile_k: rows, columns and depth of the tile that one step multiplies, per thread block.
      steps: depth of the pipeline: operand tiles in flight in shared memory.
      wide: "M" or "N": the dimension along which the two consumer warpgroups split the tile.
      group: width, in tiles, of the bands in which the grid is traversed, so that neighbours share operands in L2.
      sms: streaming multiprocessors that the kernel takes; None is H200_SMS.
      chunks: parts along K for which the kernel waits while it gathers rows; None is the kernel's own choice.
      cluster: for summed results, blocks with the same columns that share loads of w; None is 1.
      lead: for summed results, tiles for each other device that come before the own tiles; None is a whole wave.
      splits: for all-reduced results, blocks that share the contraction of a tile; None is 1.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    steps: int
    wide: Literal["M", "N"]
    group: int
    sms: int | None = None
    chunks: int | None = None
    cluster: int | None = None
    lead: int | None = None
    splits: int | None = None

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k", "steps", "group"):
            _at_least(1, f"{name} of Tiles", getattr(self, name))
        for name in _TILES_OPTIONS:
            if getattr(self, name) is not None:
                _at_least(1, f"{name} of Tiles", getattr(self, name))
        _one_of("wide of Tiles", self.wide, ("M", "N"))

    @property
    def key(self) -> str:
        options = "".join(
            f",{name}={getattr(self, name)}" for name in _TILES_OPTIONS if getattr(self, name) is not None
        )
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
        return f"{tile},steps={self.steps},wide={self.wide},group={self.group}{options}"

    @classmethod
    def parse(cls, key: str) -> Self:
        """The tiles that have this key.

        Raises:
          DhelixError: the text is no key of tiles.
        """
        match = _TILES_KEY.fullmatch(key)
        if not match:
            raise DhelixError(f"{key[:120]!r} are not tiles: write `128x128x64,steps=4,wide=M,group=8[,sms=132]`")
        m, n, k, steps, wide, group, *options = match.groups()
        given = [int(option) if option else None for option in options]
        return cls(int(m), int(n), int(k), int(steps), "M" if wide == "M" else "N", int(group), *given)


@dataclass(frozen=True)
class Form:
    """A way to execute a collective matmul.

    Attributes:
      name: one of FORMS.
      chunks: for "hybrid", the number of pieces that the rows are cut into; 1 for the other forms.
      tiles: for "mosaic", the kernel's tiles, or None for its default; None for the other forms.
    """

    name: str
    chunks: int = 1
    tiles: Tiles | None = None

    def __post_init__(self) -> None:
        _one_of("form of a collective matmul", self.name, FORMS)
        _at_least(1, "chunks of a Form", self.chunks)
        if self.chunks != 1 and self.name != "hybrid":
            raise DhelixError(
                f'form "{self.name}" takes no chunks, but got {self.chunks}: leave them out, or use "hybrid"'
            )
        if self.tiles is not None and self.name != "mosaic":
            raise DhelixError(f'form "{self.name}" takes no tiles: leave them out, or use "mosaic"')

    @property
    def key(self) -> str:
        if self.name == "hybrid":
            return f"hybrid:{self.chunks}"
        return self.name if self.tiles is None else f"{self.name}:{self.tiles.key}"

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: by position in FORMS, then by chunks, then by tiles."""
        return FORMS.index(self.name), self.chunks, self.key

    @classmethod
    def parse(cls, key: str) -> Self:
        """The form that has this key.

        Raises:
          DhelixError: the text is no key of a form.
        """
        name, _, rest = key.partition(":")
        if name == "hybrid" and rest:
            if not rest.isdecimal():
                raise DhelixError(f"{rest[:120]!r} is not a number of chunks: write `hybrid:4`")
            return cls(name, chunks=int(rest))
        return cls(name, tiles=Tiles.parse(rest)) if rest else cls(name)


MONOLITHIC = Form("monolithic")


@dataclass(frozen=True)
class SiteTimes:
    """The measurements of a site, each alone on the GPUs.

    Attributes:
      gemm: the whole local GEMM by cuBLAS, with its operands already gathered.
      collective: the collective by NCCL.
      forms: the collective matmul in each form that was available.
    """

    gemm: Timing
    collective: Timing
    forms: Mapping[Form, Timing]

    @property
    def bound(self) -> float:
        """Seconds with perfect overlap: the longer of GEMM and collective."""
        return max(self.gemm.seconds, self.collective.seconds)

    def fastest(self) -> dict[tuple[str, int], tuple[Form, Timing]]:
        """For each name and number of chunks: the form with the fastest tiles, and its time."""
        found: dict[tuple[str, int], tuple[Form, Timing]] = {}
        for form in sorted(self.forms, key=lambda form: form.order):
            known = found.get((form.name, form.chunks))
            if known is None or self.forms[form].seconds < known[1].seconds:
                found[form.name, form.chunks] = form, self.forms[form]
        return found

    def merged(self, later: SiteTimes) -> SiteTimes:
        """`later`, plus the forms that only the earlier run has.

        These are scaled by the ratio of the monolithic form's times, because the machines may differ. They are dropped
        if either run lacks that time.
        """
        if MONOLITHIC not in self.forms or MONOLITHIC not in later.forms:
            return later
        scale = later.forms[MONOLITHIC].seconds / self.forms[MONOLITHIC].seconds
        earlier = {
            form: replace(timing, seconds=timing.seconds * scale, spread=timing.spread * scale)
            for form, timing in self.forms.items()
        }
        return replace(later, forms={**earlier, **later.forms})


@dataclass(frozen=True)
class Times:
    """Sites measured on one kind of hardware, over one link, under one launch setting (as in `profile.Profile`).

    Attributes:
      measured_on: oldest first; several after `merged`.
    """

    hardware: str
    link: str
    setting: str = "default"
    measured_on: tuple[Provenance, ...] = ()
    sites: Mapping[Site, SiteTimes] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """32 hex digits of the contents; equal times have equal digests on every host."""
        sites = [
            (site.key, times.gemm, times.collective, sorted((form.key, repr(t)) for form, t in times.forms.items()))
            for site, times in sorted(self.sites.items(), key=lambda item: item[0].key)
        ]
        whole = self.hardware, self.link, self.setting, self.measured_on, sites
        return hashlib.blake2b(repr(whole).encode(), digest_size=16).hexdigest()

    def merged(self, later: Times) -> Times:
        """Both; sites that both have are merged by `SiteTimes.merged`."""
        measured_on = tuple(dict.fromkeys((*self.measured_on, *later.measured_on)))
        both = {s: self.sites[s].merged(times) for s, times in later.sites.items() if s in self.sites}
        return replace(self, measured_on=measured_on, sites={**self.sites, **later.sites, **both})


def choose(site: Site, times: Times | None, possible: Callable[[Form], bool] = lambda form: True) -> Form:
    """The form in which to execute the collective matmul at `site`.

    Args:
      times: of the hardware and link here; None if nothing was measured on them.
      possible: whether a form is available here; other forms are skipped.

    Returns:
      The fastest possible form that saves more than MARGIN and the noise, or MONOLITHIC if none is known to. For an
      unmeasured site, its tiles are the best ones of the nearest site.
    """
    deciding = {} if times is None else around(site, times)
    if not deciding:
        return MONOLITHIC
    gains = [_gains(times) for times, _ in deciding.values()]
    weights = [weight for _, weight in deciding.values()]
    best, most = MONOLITHIC, 0.0
    for way, (form, _) in gains[0].items():
        if not possible(form) or not all(way in other for other in gains):
            continue
        gain = sum(weight * other[way][1] for weight, other in zip(weights, gains, strict=True))
        if gain > most:
            best, most = form, gain
    return best


def _gains(times: SiteTimes) -> dict[tuple[str, int], tuple[Form, float]]:
    """The forms that beat the monolithic one here, each with the logarithm of its speed-up."""
    fastest = times.fastest()
    if (MONOLITHIC.name, MONOLITHIC.chunks) not in fastest:
        return {}
    _, plain = fastest.pop((MONOLITHIC.name, MONOLITHIC.chunks))
    return {
        way: (form, math.log(plain.seconds / timing.seconds))
        for way, (form, timing) in fastest.items()
        if plain.seconds - timing.seconds > max(MARGIN * plain.seconds, plain.spread + timing.spread)
    }


def around(site: Site, times: Times) -> dict[Site, tuple[SiteTimes, float]]:
    """The measured sites that decide for `site`, nearest first, with weights that sum to 1.

    Returns:
      The site itself if it was measured. Otherwise the fewest nearest sites that enclose it in each size; empty if it
      lies outside of all measured sites.
    """
    if site in times.sites:
        return {site: (times.sites[site], 1.0)}
    nearest = related(site, times)
    steps = {other: _steps(site, other) for other in nearest}
    for count in range(1, len(nearest) + 1):
        chosen = nearest[:count]
        if _encloses([steps[other] for other in chosen]):
            nearness = [1.0 / math.hypot(*steps[other]) ** 2 for other in chosen]
            return {o: (times.sites[o], n / sum(nearness)) for o, n in zip(chosen, nearness, strict=True)}
    return {}


def related(site: Site, times: Times) -> list[Site]:
    """Measured sites of the same family within REACH in each size, nearest first."""
    if min(site.sizes) == 0:
        return []
    steps = {o: _steps(site, o) for o in times.sites if o.family == site.family and min(o.sizes) > 0}
    within = [other for other in steps if max(map(abs, steps[other])) <= math.log(REACH)]
    return sorted(within, key=lambda other: (math.hypot(*steps[other]), other))


def _steps(site: Site, other: Site) -> tuple[float, ...]:
    """From `site` to `other`, as logarithms of the size ratios."""
    return tuple(math.log(there / here) for here, there in zip(site.sizes, other.sizes, strict=True))


def _encloses(steps: Sequence[tuple[float, ...]]) -> bool:
    return all(min(column) <= 0.0 <= max(column) for column in zip(*steps, strict=True))
