"""Results of `collective_matmul.py` as data and files, and as the times that the library reads."""

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
    """One site.

    Attributes:
      name: of the shape.
      iterations: of one turn.
      us: microseconds of one iteration in each round, by GEMM, COLLECTIVE or the form's key.
      differs: of each form, the largest difference to float32 by the largest result.
      failed: why a form has no times.
    """

    name: str
    iterations: int
    us: dict[str, list[float]] = field(default_factory=dict)
    differs: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def best_tiles(self) -> list[Tiles]:
        """Of the Mosaic kernels, the fastest first."""
        forms = {Form.parse(key): values for key, values in self.us.items() if key.startswith("mosaic:")}
        return [f.tiles for f in sorted(forms, key=lambda f: (statistics.median(forms[f]), f.order)) if f.tiles]

    def times(self) -> SiteTimes | None:
        """None if a side alone has no time. Spreads are of what the rounds do not have in common."""
        timings = {key: Timing.of(us / 1e6 for us in values) for key, values in without_drift(self.us).items()}
        if GEMM not in timings or COLLECTIVE not in timings:
            return None
        gemm, collective = timings.pop(GEMM), timings.pop(COLLECTIVE)
        return SiteTimes(gemm, collective, {Form.parse(key): timing for key, timing in timings.items()})

    def line(self, site: Site) -> str:
        """For a terminal: both sides in microseconds, and the share of each form, by the fastest of its variants."""
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
    """What one call measured.

    Attributes:
      devices: size of the axis.
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
        """Raises DhelixError for a file that no `collective_matmul.py` wrote."""
        try:
            record = json.loads(path.read_text())
            found = {Site.parse(key): Measured(**values) for key, values in record.pop("sites").items()}
            return cls(**{**record, "on": Provenance(**record["on"]), "sites": found})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise DhelixError(f"{path} holds no results of benchmarks/collective_matmul/run.py; leave it out") from None

    def times(self) -> Times:
        """As the library reads them."""
        found = {site: times for site, m in self.sites.items() if (times := m.times()) is not None}
        return Times(gpu_name(self.on.gpu), self.link, self.setting, (self.on,), found)


def without_drift(us: dict[str, list[float]]) -> dict[str, list[float]]:
    """Times of programs, round by round, without what all of a round have in common; programs without times left out.

    A GPU grows warm, or its clock falls, and all programs of the rounds from then on take longer: the median of what
    they take, each relative to its own median, says how much. What is left is how a program differs from the others.
    """
    timed = {key: values for key, values in us.items() if values}
    rounds = max(map(len, timed.values()), default=0)
    complete = [values for values in timed.values() if len(values) == rounds]
    drift = [
        statistics.median(values[number] / statistics.median(values) for values in complete) for number in range(rounds)
    ]
    return {key: [t / d for t, d in zip(values, drift, strict=False)] for key, values in timed.items()}


def _text(record: dict[str, Any]) -> str:
    """JSON with a list of numbers on one line. Line ends are of lists and objects only: in texts they are escaped."""
    numbers = re.compile(r"\[\n([\s\d.,e+-]+)\]")
    return numbers.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(record, indent=1)) + "\n"


def merged(results: Iterable[Results]) -> dict[Site, Measured]:
    """All sites; of one that several files hold, the last counts."""
    return {site: found for result in results for site, found in result.sites.items()}
