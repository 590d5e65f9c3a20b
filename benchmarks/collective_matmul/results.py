"""Results of `run.py` as data and files, and as the times that the library reads."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import Form, Site, SiteTimes, Tiles, Times
from dhelix.profiles.hardware import gpu_name
from dhelix.profiles.profile import Provenance, Timing

GEMM, COLLECTIVE = "gemm", "collective"


@dataclass
class Measured:
    """The results of one site.

    Attributes:
      name: name of the shape.
      iterations: number of iterations in one turn (one run of a program's loop).
      us: microseconds of one iteration in each round, by program: GEMM, COLLECTIVE or a form's key.
      differs: by form, the largest difference from float32, divided by the largest result.
      failed: why a program has no times, by program.
    """

    name: str
    iterations: int
    us: dict[str, list[float]] = field(default_factory=dict)
    differs: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def best_tiles(self) -> list[Tiles]:
        """Tiles of the measured Mosaic kernels, the fastest first."""
        forms = {Form.parse(key): values for key, values in self.us.items() if key.startswith("mosaic:")}
        return [f.tiles for f in sorted(forms, key=lambda f: (statistics.median(forms[f]), f.order)) if f.tiles]

    def times(self) -> SiteTimes | None:
        """Times and spreads after `without_drift`. None if the GEMM or the collective alone has no time."""
        timings = {key: Timing.of(us / 1e6 for us in values) for key, values in without_drift(self.us).items()}
        if GEMM not in timings or COLLECTIVE not in timings:
            return None
        gemm, collective = timings.pop(GEMM), timings.pop(COLLECTIVE)
        return SiteTimes(gemm, collective, {Form.parse(key): timing for key, timing in timings.items()})

    def line(self, site: Site) -> str:
        """Text for a terminal: times of both sides alone, and each form's share (bound / fastest time)."""
        times = self.times()
        if times is None:
            return f"{self.name}: {site.key}: no times: {self.failed}"
        best: dict[str, float] = {}
        for form, timing in times.forms.items():
            best[form.name] = max(times.bound / timing.seconds, best.get(form.name, 0.0))
        shares = " ".join(f"{name} {share:.3f}" for name, share in best.items())
        alone = f"gemm {1e6 * times.gemm.seconds:.1f} us collective {1e6 * times.collective.seconds:.1f} us"
        tiles = f" ({best_tiles[0].key})" if (best_tiles := self.best_tiles()) else ""
        whys: dict[str, list[str]] = {}
        for key, why in self.failed.items():
            whys.setdefault(key.partition(":")[0], []).append(f"{key}: {why}")
        failed = "".join(f"\n    {len(lines)} of {name} failed; {lines[0]}" for name, lines in whys.items())
        return f"{self.name}: {site.key}: {alone}: {shares}{tiles}{failed}"


@dataclass
class Results:
    """The results of one call.

    Attributes:
      devices: size of the axis.
      setting: launch setting of the process.
      dropped: sites that the budget had no time for.
    """

    on: Provenance
    link: str
    devices: int
    setting: str = "default"
    sites: dict[Site, Measured] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        sites = {site.key: asdict(found) for site, found in self.sites.items()}
        record = {**vars(self), "on": asdict(self.on), "sites": sites}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(_text(record))
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a results file. Raises DhelixError if `run.py` did not write it."""
        try:
            record = json.loads(path.read_text())
            found = {Site.parse(key): Measured(**values) for key, values in record.pop("sites").items()}
            return cls(**{**record, "on": Provenance(**record["on"]), "sites": found})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise DhelixError(f"{path} holds no results of benchmarks/collective_matmul/run.py; leave it out") from None

    def times(self) -> Times:
        """The times in the form that the library reads."""
        found = {site: times for site, m in self.sites.items() if (times := m.times()) is not None}
        return Times(gpu_name(self.on.gpu), self.link, self.setting, (self.on,), found)


def without_drift(us: dict[str, list[float]]) -> dict[str, list[float]]:
    """Divides the times of each round by the drift that all programs of the round share. Drops programs without times.

    If the GPU grows warm or its clock falls, all programs of later rounds take longer. A round's drift is the median
    over programs of the time relative to the program's own median.
    """
    timed = {key: values for key, values in us.items() if values}
    rounds = max(map(len, timed.values()), default=0)
    complete = [values for values in timed.values() if len(values) == rounds]
    drift = [
        statistics.median(values[number] / statistics.median(values) for values in complete) for number in range(rounds)
    ]
    return {key: [t / d for t, d in zip(values, drift, strict=False)] for key, values in timed.items()}


def _text(record: dict[str, Any]) -> str:
    """JSON with each list of numbers on one line. Strings are safe, because JSON escapes their line ends."""
    numbers = re.compile(r"\[\n([\s\d.,e+-]+)\]")
    return numbers.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(record, indent=1)) + "\n"


def merged(results: Iterable[Results]) -> dict[Site, Measured]:
    """The measured sites of all results. If several results hold a site, the last one counts."""
    return {site: found for result in results for site, found in result.sites.items()}
