"""The table of possible disagreements of two processes. Both processes try each row in turn."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import jax

from dhelix.passes.framework import fingerprint
from dhelix.passes.plans.plan import Plan, PlanBody, PlanTarget
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.profiles.profile import Profile, Provenance
from dhelix.tests.runtime.processes.job_steps import RefusesIn, Told, decorated, told, two_collectives

_TARGET = PlanTarget.of("H200", "nvlink", "default")
_PLAN = Plan("a step", _TARGET).with_bodies([PlanBody("both strands", "0123456789abcdef", 1, (), ())])
_PROFILE = Profile("H200", "nvlink", (Provenance("NVIDIA H200", 8, machine="one"),))
_FAST = "xla_cpu_enable_fast_math"
_FAILED = "{1} stopped before all processes ran the step: "


class Row(NamedTuple):
    """One disagreement.

    Attributes:
      message: the error of process 0, or its beginning; {0} and {1} stand for the processes.
      both: options of the step in both processes.
      other: further options in process 1.
      around: a context in which process 1 decorates and calls.
      own: process 1 has an error of its own.
    """

    message: str
    both: dict[str, Any] = {}
    other: dict[str, Any] = {}
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    own: bool = False


def _environment(**variables: str) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.dict(os.environ, variables)


def _faked(**found: str) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(fingerprint, "versions", lambda: versions | found)


versions = fingerprint.versions()

TABLE: dict[str, Row] = {
    "off": Row("DHELIX: on in {0}; off in {1}", around=_environment(DHELIX="off")),
    "off by an option of JAX": Row(
        "DHELIX: on in {0}; off (by jax_disable_jit, jax_debug_nans or jax_debug_infs) in {1}",
        around=lambda: jax.debug_nans(True),
    ),
    "DHELIX that means nothing": Row(
        f"{_FAILED}DhelixError: DHELIX='of' is unknown; set it to on or off", around=_environment(DHELIX="of"),
        own=True,
    ),
    "disable": Row("disable: none in {0}; strand-lockstep in {1}", other={"disable": ["strand-lockstep"]}),
    "strict": Row("strict: false in {0}; true in {1}", other={"strict": True}),
    "strict that raises": Row(
        f"{_FAILED}PassRefusal: pass refuses: this process has no room",
        both={"strict": True, "passes": [RefusesIn((1,))]},
        own=True,
    ),
    "left alone": Row(
        "what runs: transformed in {0}; as jax.jit runs it (a pass refused or failed) in {1}",
        both={"passes": [RefusesIn((1,))]},
    ),
    "verify": Row("verify: false in {0}; true in {1}", other={"verify": True}),
    "no plan": Row("plan: a step (", both={"plan": _PLAN}, other={"plan": None}),
    "missing plan": Row(
        f"{_FAILED}at decoration, PlanError: /nowhere/plan.json: cannot be read", both={"plan": _PLAN},
        other={"plan": "/nowhere/plan.json"}, own=True,
    ),
    "other plan": Row(
        "plan: a step (", both={"plan": _PLAN}, other={"plan": dataclasses.replace(_PLAN, program="another step")}
    ),
    "schedule": Row("schedule: dp in {0}; list in {1}", other={"schedule": "list"}),
    "skew": Row("skew: 0 in {0}; 1 in {1}", other={"skew": 1}),
    "microbatches": Row("microbatches: 2 in {0}; 4 in {1}", other={"microbatches": 4}),
    "passes": Row(
        "passes: 1 strand-duplication in {0}; none in {1}", both={"passes": [StrandDuplication()]}, other={"passes": []}
    ),
    "profile": Row("profile: auto in {0}; H200 with link nvlink (", other={"profile": _PROFILE}),
    "XLA_FLAGS": Row(
        f"XLA_FLAGS --{_FAST}: not given in {{0}}; true in {{1}}", around=_environment(XLA_FLAGS=f"--{_FAST}=true")
    ),
    "options of XLA": Row(
        f"compiler_options {_FAST}: false in {{0}}; true in {{1}}",
        both={"compiler_options": {_FAST: False}},
        other={"compiler_options": {_FAST: True}},
    ),
    "jax version": Row(
        f"version of jax: {jax.__version__} in {{0}}; 0.12.9, installed as {jax.__version__} in {{1}}",
        around=lambda: mock.patch.object(jax, "__version__", "0.12.9"),
    ),
    "dhelix version": Row(
        f"version of dhelix: {versions['dhelix']} in {{0}}; 77.0 in {{1}}", around=_faked(dhelix="77.0")
    ),
    "dhelix sources": Row(
        f"sources of dhelix: {versions['dhelix sources']} in {{0}}; 0 in {{1}}",
        around=_faked(**{"dhelix sources": "0"}),
    ),
    "memory limit": Row("memory_limit: none in {0}; 1000000 in {1}", other={"memory_limit": 1_000_000}),
    "collective matmul": Row("collective_matmul: off in {0}; ring in {1}", other={"collective_matmul": "ring"}),
    "another step": Row(
        "what comes next: {0} is about to run step 'step'; {1} is about to run step 'evaluation'",
        other={"name": "evaluation"},
    ),
}  # fmt: skip


def try_all(process: int, arguments: tuple[Any, ...]) -> list[Told]:
    """Errors of this process for each row, then if both refuse, then if the processes order collectives differently."""
    found: list[Told] = []
    for row in TABLE.values():
        options = {**row.both, **(row.other if process else {})}
        with (row.around if process else nullcontext)(), told(found):
            decorated(**options)(*arguments)
    with told(found):
        decorated(strict=True, passes=[RefusesIn((0, 1))])(*arguments)
    with told(found):
        decorated(last=two_collectives(gather_first=process == 0))(*arguments)
    return found
