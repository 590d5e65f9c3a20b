"""Files with times of collective matmuls, such as `profiles/data/collective_matmul/h200-nvlink.json`.

    times = find("H200", "nvlink")                     # the shipped file, overridden by the user's own file
    form = choose(site, times)                         # `sites.choose`

`sites.py` explains sites and forms. A file has one fact per line. A time is a list [median, spread, number of samples].
The spread is the distance between the quartiles. Median and spread are in microseconds, with five and three significant
digits:

    {
    "schema": 1,
    "hardware": "H200",
    "link": "nvlink",
    "setting": "default",
    "measured_on": [
    {"gpu": "NVIDIA H200", "gpus": 4, "date": "2026-01-31", "nccl": "2.28.9", ...}
    ],
    "sites": {
    "all_gather_matmul bfloat16 8192x4096x1536 over 4": {
    "gemm": [161.4, 0.3, 8],                           the whole local GEMM by cuBLAS, alone
    "collective": [170.2, 0.9, 8],                     the collective by NCCL, alone
    "forms": {
    "monolithic": [338.1, 1.2, 8],
    "mosaic:128x256x64,steps=4,wide=N,group=8,sms=132": [190.5, 0.6, 8]
    }}
    }
    }

Equal times give equal text. Files may come from strangers, so every field is checked when a file is read. A file is
read when it is needed, and again only after it has changed. `benchmarks/collective_matmul/run.py` measures the times,
and `benchmarks/collective_matmul/tables.py --ship` writes the files.
"""

from __future__ import annotations

import functools
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import FORMS, Form, Site, SiteTimes, Times, choose
from dhelix.profiles.files import codec, storage
from dhelix.profiles.files.codec import (
    Count,
    Kind,
    Microseconds,
    On,
    ProfileFileError,
    Row,
    Text,
    json_lines,
    json_text,
    microseconds_text,
)
from dhelix.profiles.files.profile_json import provenance, provenance_text
from dhelix.profiles.hardware import describe
from dhelix.profiles.profile import ALIKE, Timing

SCHEMA = 1
FOLDER = "collective_matmul"
"""The name of the folder with these files. It is inside the folders that hold profiles."""

_SHIPPED = storage.SHIPPED / FOLDER
_FILE = Kind("file of collective matmuls' times", "measure again")


class _Timing(Row, frozen=True):
    median: Annotated[float, Meta(gt=0, le=1e10)]
    spread: Microseconds
    samples: Count


class _Site(Struct):
    gemm: _Timing
    collective: _Timing
    forms: dict[str, _Timing]


class _File(Struct):
    hardware: Text
    link: Text
    setting: Text = Text("default")
    measured_on: list[On] = []
    sites: dict[str, _Site] = {}


def find(hardware: str, link: str) -> Times | None:
    """All known times of collective matmuls for this hardware and link, or None if there are none.

    Times in the user's own file override times in the shipped file. The user's file is in the folder
    `collective_matmul` next to the user's profile (`storage.users_file`). Both files override the times of a similar
    GPU, which has equally fast matrix products and links (`Hardware.like`).

    Raises:
      ProfileFileError: a file cannot be read, or the hardware or link in it differs from the file's name.
    """
    name = storage.file_name(hardware, link)
    like = describe(hardware, link).like
    found = _as_on(find(like, link), hardware) if like else None
    for path in (_SHIPPED / name, storage.users_file(hardware, link).parent / FOLDER / name):
        if not path.exists():
            continue
        later = load(path)
        if storage.file_name(later.hardware, later.link) != name:
            raise ProfileFileError(
                f"{path}: measured on {later.hardware} with link {later.link}: rename this file to "
                f"{storage.file_name(later.hardware, later.link)}"
            )
        found = later if found is None else found.merged(later)
    return found


def _as_on(times: Times | None, hardware: str) -> Times | None:
    if times is None:
        return None

    def marked(site: SiteTimes) -> SiteTimes:
        forms = {form: replace(timing, source=ALIKE) for form, timing in site.forms.items()}
        return replace(site, forms=forms)

    return replace(times, hardware=hardware, sites={site: marked(here) for site, here in times.sites.items()})


def load(path: Path) -> Times:
    """The times in a file. The file is read again only if it has changed.

    Raises:
      ProfileFileError: the file does not exist, cannot be read, or is not valid.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > codec.MAX_BYTES:
            raise ProfileFileError(f"{path}: no {_FILE.name}: check the path")
        return _read(path.absolute(), status.st_mtime_ns, status.st_size)
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileFileError(f"{path}: cannot be read ({error}): check the path") from None


@functools.lru_cache(maxsize=16)
def _read(path: Path, _mtime_ns: int, _size: int) -> Times:
    return loads(path.read_text(encoding="utf-8"), str(path))


def save(times: Times, path: Path) -> None:
    """Writes times to a file, either completely or not at all.

    Raises:
      ProfileFileError: `loads` would reject the times.
      DhelixError: the file cannot be written.
    """
    text = dumps(times)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise DhelixError(f"{path}: cannot be written ({error.strerror}): choose another place") from error


def dumps(times: Times) -> str:
    """The text of a file with these times.

    Raises:
      ProfileFileError: `loads` would reject the text, for example because a time is NaN.
    """
    sites = (f"{json_text(site.key)}: {_site_text(times.sites[site])}" for site in sorted(times.sites))
    text = codec.document(
        {
            "schema": str(SCHEMA),
            "hardware": json_text(times.hardware),
            "link": json_text(times.link),
            "setting": json_text(times.setting),
            "measured_on": json_lines("[", map(provenance_text, times.measured_on), "]"),
            "sites": json_lines("{", sites, "}"),
        }
    )
    loads(text, "these times")
    return text


def _site_text(times: SiteTimes) -> str:
    ordered = sorted(times.forms, key=lambda form: form.order)
    forms = (f"{json_text(form.key)}: {_timing_text(times.forms[form])}" for form in ordered)
    parts = [
        f'"gemm": {_timing_text(times.gemm)}',
        f'"collective": {_timing_text(times.collective)}',
        f'"forms": {json_lines("{", forms, "}")}',
    ]
    return "{\n" + ",\n".join(parts) + "}"


def _timing_text(timing: Timing) -> str:
    return f"[{microseconds_text(timing.seconds)}, {microseconds_text(timing.spread, 3)}, {timing.samples}]"


def loads(text: str, origin: str) -> Times:
    """The times in the text of a file.

    Args:
      origin: name of the text in error messages.

    Raises:
      ProfileFileError: the text is not valid.
    """
    file = codec.decode(text, _File, origin, SCHEMA, _FILE)
    measured_on = tuple(map(provenance, file.measured_on))
    sites = {_parsed(Site, key, origin): _site_times(site, origin) for key, site in file.sites.items()}
    return Times(str(file.hardware), str(file.link), str(file.setting), measured_on, sites)


def _parsed[T: (Site, Form)](kind: type[T], key: str, origin: str) -> T:
    """The Site or Form whose key is `key`.

    Raises ProfileFileError if dhelix would write the key in another way. So no site or form has two keys.
    """
    codec.names({key: None}, "sites", origin, _FILE)
    try:
        found = kind.parse(key)
    except DhelixError as error:
        raise ProfileFileError(f"{origin}: {error}") from None
    if found.key != key:
        raise ProfileFileError(f"{origin}: {key!r}: write {found.key!r}")
    return found


def _site_times(site: _Site, origin: str) -> SiteTimes:
    forms = {_parsed(Form, key, origin): _timing(row) for key, row in site.forms.items()}
    return SiteTimes(_timing(site.gemm), _timing(site.collective), forms)


def _timing(row: _Timing) -> Timing:
    return Timing(row.median / 1e6, row.spread / 1e6, row.samples)


def share_table(times: Times, names: Mapping[Site, str]) -> list[tuple[str, ...]]:
    """The rows of a table for people. The first row is the header.

    A row has the times of GEMM and collective, and a share for each form. Then follow the form that `choose` takes and
    its speed-up over the monolithic form. The share is max(T_gemm, T_collective) / T_form. It is 1.0 if the shorter of
    GEMM and collective is hidden completely. For hybrids and Mosaic kernels, it is the share of the fastest variant. It
    is empty if the form was not measured.

    Args:
      names: the sites of the table, in order, with their labels.
    """
    head = ("layer", "M", "K", "N", "n", "GEMM µs", "collective µs", *(name.replace("_", " ") for name in FORMS))
    rows: list[tuple[str, ...]] = [(*head, "chosen", "over monolithic")]
    for site, name in names.items():
        here, chosen = times.sites[site], choose(site, times)
        best: dict[str, float] = {}
        for form, timing in here.forms.items():
            best[form.name] = min(timing.seconds, best.get(form.name, math.inf))
        sizes = map(str, (*site.sizes, site.axis_size))
        alone = (f"{1e6 * timing.seconds:.0f}" for timing in (here.gemm, here.collective))
        shares = (f"{here.bound / best[form]:.2f}" if form in best else "" for form in FORMS)
        taken = here.forms.get(chosen)
        gain = f"{best['monolithic'] / taken.seconds:.2f}" if taken and "monolithic" in best else ""
        rows.append((name, *sizes, *alone, *shares, chosen.name.replace("_", " ") + _variety(chosen), gain))
    return rows


def _variety(form: Form) -> str:
    if form.tiles:
        return f" {form.tiles.tile_m}x{form.tiles.tile_n}x{form.tiles.tile_k}"
    return f", {form.chunks} chunks" if form.name == "hybrid" else ""
