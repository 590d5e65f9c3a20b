"""Collective matmuls as data: which product and collective (Site), how they are executed (Form), and the best form.

    rows: M of the product over all devices, with leading batch dimensions multiplied in
    kind                    operands on one device of n            result on one device
    all_gather_matmul       x [rows / n, K]    w [K, columns]      [rows, columns]        gather x, multiply
    matmul_reduce_scatter   x [rows, K]        w [K, columns]      [rows / n, columns]    multiply, sum and scatter
    matmul_all_reduce       x [rows, K]        w [K, columns]      [rows, columns]        multiply, sum

Sites and forms have a `key`, which is one line of text for JSON files and log lines. `parse` reads a key:

    Site("all_gather_matmul", 8192, 4096, 1536, "bfloat16", 4).key
        all_gather_matmul bfloat16 8192x4096x1536 over 4
    Form("hybrid", chunks=4).key                                        hybrid:4
    Form("mosaic", tiles=Tiles(128, 256, 64, 4, "N", 8, 132)).key       mosaic:128x256x64,steps=4,wide=N,group=8,sms=132

The form `monolithic` is a GEMM by cuBLAS and a collective by NCCL, one after the other. `choose` takes another form
only if measurements show that it is faster. For a measured site, its own times decide. For a site between measured
sites, a form must be faster at each of the nearest sites that enclose it. The distance between two sites is measured in
the logarithms of rows, contraction and columns:

    rows      4096      6144      8192       16384      32768
    ring      wins        ?       loses       wins         ?        6144: monolithic, because ring loses at 8192
    mosaic    wins        ?       wins        wins         ?        6144: mosaic; 32768: monolithic, no larger site

A `Times` object holds all times for one kind of GPU and one link. `times.py` reads them from files.
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
"""A form must save more than this fraction of the monolithic form's time, and more than the sum of both spreads."""

H200_SMS = 132
"""Number of streaming multiprocessors of an H100 SXM or H200. Without `Tiles.sms`, a kernel takes all of them."""

REACH = 4.0
"""A measured site counts as a neighbour if each of its sizes differs by at most this factor."""

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
    """One collective matmul of a program. For each form, the site, the GPU and the link decide how long it takes.

    Sizes may be 0, for an empty batch. Such a site is never measured.

    Attributes:
      kind: one of KINDS.
      rows: M of the whole product over all devices, including leading batch dimensions.
      contraction: K of the GEMM on one device.
      columns: N of the GEMM on one device, summed over all weights that share an all-gather.
      dtype: type of operands and result, such as "bfloat16".
      axis_size: number of devices on the mesh axis of the collective.
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
        """Kind, type and number of devices. Only sites of the same family are compared with each other."""
        return self.kind, self.dtype, self.axis_size

    @property
    def key(self) -> str:
        return f"{self.kind} {self.dtype} {self.rows}x{self.contraction}x{self.columns} over {self.axis_size}"

    @classmethod
    def parse(cls, key: str) -> Self:
        """The site whose key is `key`.

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
    """How a Mosaic-GPU kernel splits its GEMM into tiles.

    Attributes:
      tile_m, tile_n, tile_k: rows, columns and depth of the tile that a thread block multiplies in one step.
      steps: depth of the pipeline: the number of operand tiles in flight in shared memory.
      wide: "M" or "N": the dimension along which the two consumer warpgroups split the tile.
      group: thread blocks work through the result in bands of this many tiles, so that neighbouring blocks share
        operands in L2.
      sms: number of streaming multiprocessors that the kernel takes; None stands for H200_SMS.
      chunks: only all_gather_matmul: number of parts along K into which gathered rows are split. The kernel waits for
        each part on its own. None leaves the choice to the kernel.
      cluster: only kinds that sum: number of thread blocks with the same columns that share loads of w; None means 1.
      lead: only kinds that sum: number of tiles for each other device that a device computes before its own first tile.
        None stands for one wave of tiles.
      splits: only matmul_all_reduce: number of thread blocks that share the contraction of a tile; None stands for 1.
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
        """The tiles whose key is `key`.

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
      chunks: for "hybrid", the number of parts into which the rows are split; 1 for the other forms.
      tiles: for "mosaic", the kernel's tiles, or None for the kernel's default; None for the other forms.
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
        """A sort key: forms are sorted by their position in FORMS, then by chunks, then by key."""
        return FORMS.index(self.name), self.chunks, self.key

    @classmethod
    def parse(cls, key: str) -> Self:
        """The form whose key is `key`.

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
    """The measured times of a site. Each was measured while nothing else ran on the GPUs.

    Attributes:
      gemm: time of the GEMM on one device by cuBLAS, without the collective.
      collective: time of the collective by NCCL.
      forms: time of the collective matmul in each form that was available.
    """

    gemm: Timing
    collective: Timing
    forms: Mapping[Form, Timing]

    @property
    def bound(self) -> float:
        """The time with perfect overlap: the longer time of GEMM and collective, in seconds."""
        return max(self.gemm.seconds, self.collective.seconds)

    def fastest(self) -> dict[tuple[str, int], tuple[Form, Timing]]:
        """For each name of a form and number of chunks: the form with the fastest tiles, and its time."""
        found: dict[tuple[str, int], tuple[Form, Timing]] = {}
        for form in sorted(self.forms, key=lambda form: form.order):
            known = found.get((form.name, form.chunks))
            if known is None or self.forms[form].seconds < known[1].seconds:
                found[form.name, form.chunks] = form, self.forms[form]
        return found

    def merged(self, later: SiteTimes) -> SiteTimes:
        """The times in `later`, and the times of forms that only `self` has.

        The machines may differ, so the times from `self` are multiplied by a ratio: the monolithic form's time in
        `later` over its time in `self`. If one of these two times is missing, the times from `self` are left out.
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
    """All times of collective matmuls for one kind of GPU, one link and one launch setting (see `profile.Profile`).

    Attributes:
      measured_on: machine and software of the measurements, oldest first. Merged times have several entries.
      sites: the times of each measured site.
    """

    hardware: str
    link: str
    setting: str = "default"
    measured_on: tuple[Provenance, ...] = ()
    sites: Mapping[Site, SiteTimes] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A hash of the contents, 32 hex digits. Equal times have equal hashes on every host."""
        sites = [
            (site.key, times.gemm, times.collective, sorted((form.key, repr(t)) for form, t in times.forms.items()))
            for site, times in sorted(self.sites.items(), key=lambda item: item[0].key)
        ]
        whole = self.hardware, self.link, self.setting, self.measured_on, sites
        return hashlib.blake2b(repr(whole).encode(), digest_size=16).hexdigest()

    def merged(self, later: Times) -> Times:
        """The sites of both objects. A site that is in both is merged by `SiteTimes.merged`."""
        measured_on = tuple(dict.fromkeys((*self.measured_on, *later.measured_on)))
        both = {s: self.sites[s].merged(times) for s, times in later.sites.items() if s in self.sites}
        return replace(self, measured_on=measured_on, sites={**self.sites, **later.sites, **both})


def choose(site: Site, times: Times | None, possible: Callable[[Form], bool] = lambda form: True) -> Form:
    """The form in which to execute the collective matmul at `site`.

    Args:
      times: times for the GPU and the link of this program; None if nothing was measured with them.
      possible: says whether a form can be used. Other forms are not chosen.

    Returns:
      The fastest possible form, if it saves more than MARGIN and the spreads; otherwise MONOLITHIC. For an unmeasured
      site, the tiles of the form are the fastest tiles of the nearest measured site.
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
    """The forms that are faster than the monolithic form at a site, each with the logarithm of its speed-up.

    The result maps the name of a form and its number of chunks to the form with the fastest tiles.
    """
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
    """The measured sites whose times decide for `site`, nearest first, with their times and weights.

    Returns:
      The site itself if it was measured. Otherwise the smallest number of nearest sites that enclose it: for each of
      the three sizes, one site is at most as large, and one is at least as large. Empty if the measured sites do not
      enclose it. The weights add up to 1.
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
    """The measured sites of the same family, nearest first. Each of their sizes differs by at most the factor REACH."""
    if min(site.sizes) == 0:
        return []
    steps = {o: _steps(site, o) for o in times.sites if o.family == site.family and min(o.sizes) > 0}
    within = [other for other in steps if max(map(abs, steps[other])) <= math.log(REACH)]
    return sorted(within, key=lambda other: (math.hypot(*steps[other]), other))


def _steps(site: Site, other: Site) -> tuple[float, ...]:
    """The vector from `site` to `other`: the logarithm of the ratio of each size."""
    return tuple(math.log(there / here) for here, there in zip(site.sizes, other.sizes, strict=True))


def _encloses(steps: Sequence[tuple[float, ...]]) -> bool:
    return all(min(column) <= 0.0 <= max(column) for column in zip(*steps, strict=True))
