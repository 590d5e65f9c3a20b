"""Estimates the time of a collective matmul in a given form, from the time of its GEMM.

    gemm = estimator.solo(gemm_key(site))              Estimate(seconds=0.00123, source=<Source.MEASURED>, ...)
    estimate(site, form, times, gemm)                  Estimate(seconds=0.00123, ...): the gather is hidden

A site is one collective matmul of a program, and a form is a way to execute it (`sites.py`). Collective matmuls are
measured in loops without pauses, at the clock that the GPU's power limit allows. At this clock, cuBLAS is slower than
in a profile, which is measured at full clock. But both measurements contain the time of the GEMM. So only the ratio of
the form's time to the GEMM's time is taken from a file of collective matmuls. The ratio comes from the first of these
sources that exists:

1. The site in this form. The estimate counts as measured if the GEMM was measured.
2. The site in the same form with other tiles, the fastest of them: interpolated.
3. The measured sites that enclose the site (`sites.around`), as a weighted geometric mean: interpolated.
4. The nearest measured site of the same family, if its sizes differ by at most the factor `sites.REACH`: a guess.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dhelix.profiles.collective_matmul.sites import KINDS, Form, Site, SiteTimes, Times, around, related
from dhelix.profiles.estimates.estimator import Estimate, Source
from dhelix.profiles.keys import CollectiveKey, OperatorKey
from dhelix.profiles.profile import ALIKE

_TYPES = {"bfloat16": ("bf16", 2), "float16": ("f16", 2), "float32": ("f32", 4)}
_COLLECTIVES: dict[str, str] = dict(zip(KINDS, ("all-gather", "reduce-scatter", "all-reduce"), strict=True))


def gemm_key(site: Site) -> OperatorKey | None:
    """The key of the site's GEMM on one device by cuBLAS; None if a size is 0 or the type is not in `_TYPES`."""
    if site.dtype not in _TYPES or min(site.sizes) == 0:
        return None
    kind, width = _TYPES[site.dtype]
    m, k, n = site.sizes
    return OperatorKey(
        "gemm", f"{kind},{kind}->{kind}:nn:cublaslt", (m, n, k), 2.0 * m * n * k, width * (m * k + k * n + m * n)
    )


def collective_key(site: Site) -> CollectiveKey | None:
    """The key of the site's collective by NCCL inside a node; None if `gemm_key` is None."""
    if gemm_key(site) is None:
        return None
    _, width = _TYPES[site.dtype]
    side = site.contraction if site.kind == "all_gather_matmul" else site.columns
    return CollectiveKey(_COLLECTIVES[site.kind], width * site.rows * side, site.axis_size)


def estimate(site: Site, form: Form, times: Times | None, gemm: Estimate) -> Estimate | None:
    """The time of the collective matmul at `site` in `form`, while nothing else runs.

    Args:
      times: measured times of collective matmuls, or None.
      gemm: the time of the site's GEMM.

    Returns:
      The estimate; None if `times` has no suitable site in this form.
    """
    if times is None:
        return None
    # 1. This site in this form.
    if site in times.sites and form in times.sites[site].forms:
        here = times.sites[site]
        source = Source.INTERPOLATED if here.forms[form].source == ALIKE else Source.MEASURED
        return _scaled(gemm, here.forms[form].seconds / here.gemm.seconds, source)
    # 2. This site with other tiles, or 3. sites around it. For a measured site, `around` returns the site itself.
    ratio = _ratio(form, around(site, times))
    if ratio is not None:
        return _scaled(gemm, ratio, Source.INTERPOLATED)
    # 4. The nearest site of the family.
    ratio = _ratio(form, {other: (times.sites[other], 1.0) for other in related(site, times)[:1]})
    return None if ratio is None else _scaled(gemm, ratio, Source.GUESS)


def _ratio(form: Form, known: dict[Site, tuple[SiteTimes, float]]) -> float | None:
    """The ratio of the form's time to the GEMM's time: a weighted geometric mean over the sites in `known`.

    For each site, the fastest tiles of the form count. None if there are no sites, or if one of them has no time of the
    form.
    """
    logarithm = 0.0
    for times, weight in known.values():
        fastest = times.fastest().get((form.name, form.chunks))
        if fastest is None:
            return None
        logarithm += weight * math.log(fastest[1].seconds / times.gemm.seconds)
    return math.exp(logarithm) if known else None


def _scaled(gemm: Estimate, ratio: float, source: Source) -> Estimate:
    source = max(source, gemm.source, key=lambda s: s.rank)
    return replace(gemm, seconds=ratio * gemm.seconds, spread=ratio * gemm.spread, source=source)
