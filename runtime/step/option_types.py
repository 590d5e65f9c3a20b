"""Types of the options of `strand_interleave`, for type checkers: what does not exist is an error before anything runs.

`strand_interleave` says what options mean, `schedules.py` what schedules are. Nothing here imports jax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, get_args

if TYPE_CHECKING:
    from dhelix.passes.plans.pairing_plan import PairingPlan
    from dhelix.profiles.collective_matmul.sites import Form
    from dhelix.profiles.profile import Profile
    from dhelix.runtime.pipeline.fold import Fold
    from dhelix.runtime.step.interleaved_step import InterleavedStep

Reduce = Literal["mean", "sum", "weighted"]
Schedule = Literal["dp", "list", "xla", "round_robin", "forward_forward", "backward_backward", "intra_batch"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
DEFAULT: Schedule = "dp"
LIMITED = ("dp", "list")
"""Schedules that take no more memory than the plain step and 3 %; the others are to be compared with, as they are."""
SKEWED = ("dp", "list", "xla", "round_robin")
"""Schedules that pair forward with backward, whose strands can be kept some layers apart."""


class JitOptions(TypedDict, total=False):
    """Those of `jax.jit`."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    compiler_options: dict[str, Any] | None


class Options(JitOptions, total=False):
    """Those of `strand_interleave`."""

    microbatches: int | None
    reduce: Reduce
    schedule: Schedule
    profile: str | Path | Profile | None
    plan: str | Path | PairingPlan | None
    memory_limit: int | None
    max_in_flight: int | None
    skew: int
    pipeline: Fold | None
    collective_matmul: str | Form | None
    strict: bool
    verify: bool
    passes: Sequence[Any] | None  # of `manager.Pass`; checkers tell class attributes from properties
    disable: Collection[str]
    dump_to: str | Path | None


class Decorator(Protocol):
    """What makes an `InterleavedStep` of a function, which takes and returns what the function does."""

    def __call__[**P, R](self, function: Callable[P, R], /) -> InterleavedStep[P, R]: ...
