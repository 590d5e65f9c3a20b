"""Sixteen things on which two processes may disagree, tried one after the other by one pair of processes.

    main(process, port)     prints, as JSON: per disagreement what this process was told and when, with its clock
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes import fingerprint
from dhelix.passes.hlo import HloModule
from dhelix.passes.manager import PassContext, Stage
from dhelix.passes.plans import pairing_plan_json
from dhelix.passes.plans.pairing_plan import PairingPlan, PlanBody, PlanTarget
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.profiles.profile import Profile, Provenance
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.runtime.step.value_and_grad import value_and_grad

PLAN = PairingPlan(
    "a step",
    PlanTarget.of("H200", "nvlink", "default"),
    (PlanBody("both strands", "0123456789abcdef", 1, (), ()),),
)
PROFILE = Profile("H200", "nvlink", (Provenance("NVIDIA H200", 8, machine="one"),))


@dataclasses.dataclass(frozen=True)
class Refuses:
    """A pass for one process alone."""

    name = "refuses"
    stage = Stage.LOWERED

    process: int

    def run(self, module: HloModule, context: PassContext) -> bool:
        if jax.process_index() == self.process:
            raise PassRefusal("this process has no room")
        return False


class Row(NamedTuple):
    """One disagreement.

    Attributes:
      told: what the message begins with, after "hosts disagree on "; or what it holds.
      common: options of both processes' step.
      other: those of process 1 alone.
      around: in which process 1 decorates and calls.
    """

    told: str
    common: dict[str, Any] = {}
    other: dict[str, Any] = {}
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def environment(**variables: str) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.dict(os.environ, variables)


def faked(**found: str) -> Callable[[], AbstractContextManager[Any]]:
    versions = {**fingerprint.versions(), **found}
    return lambda: mock.patch.object(fingerprint, "versions", lambda: versions)


TABLE: dict[str, Row] = {
    "off": Row("DHELIX: on on {0}; off on {1}", around=environment(DHELIX="off")),
    "disable": Row("disable: none on {0}; strand-lockstep on {1}", other={"disable": ["strand-lockstep"]}),
    "strict that raises": Row(
        "{1} stopped before all processes ran the step: PassRefusal: pass refuses: this process has no room",
        common={"strict": True, "passes": [Refuses(1)]},
    ),
    "verify": Row("verify: false on {0}; true on {1}", other={"verify": True}),
    "missing plan": Row(
        "{1} stopped before all processes ran the step: at decoration, DhelixError: ",
        common={"plan": PLAN},
        other={"plan": "/nowhere/plan.json"},
    ),
    "other plan": Row(
        "plan: a step (", common={"plan": PLAN}, other={"plan": dataclasses.replace(PLAN, program="another step")}
    ),
    "schedule": Row("schedule: dp on {0}; list on {1}", other={"schedule": "list"}),
    "skew": Row("skew: 0 on {0}; 1 on {1}", other={"skew": 1}),
    "microbatches": Row("microbatches: 2 on {0}; 4 on {1}", other={"microbatches": 4}),
    "passes": Row(
        "passes: 1 strand-duplication on {0}; none on {1}", common={"passes": [StrandDuplication()]},
        other={"passes": []},
    ),  # fmt: skip
    "profile": Row("profile: auto on {0}; H200 with link nvlink (", other={"profile": PROFILE}),
    "XLA_FLAGS": Row(
        "XLA_FLAGS --xla_cpu_enable_fast_math: not given on {0}; true on {1}",
        around=environment(XLA_FLAGS="--xla_force_host_platform_device_count=1 --xla_cpu_enable_fast_math=true"),
    ),
    "compiler_options": Row(
        "compiler_options xla_cpu_enable_fast_math: false on {0}; true on {1}",
        common={"compiler_options": {"xla_cpu_enable_fast_math": False}},
        other={"compiler_options": {"xla_cpu_enable_fast_math": True}},
    ),
    "jax version": Row(
        f"version of jax: {jax.__version__} on {{0}}; 0.12.9, installed as {jax.__version__} on {{1}}",
        around=lambda: mock.patch.object(jax, "__version__", "0.12.9"),
    ),
    "dhelix version": Row(
        f"version of dhelix: {fingerprint.versions()['dhelix']} on {{0}}; 77.0 on {{1}}", around=faked(dhelix="77.0")
    ),
    "dhelix sources": Row("sources of dhelix: ", around=faked(**{"dhelix sources": "fedcba9876543210"})),
    "memory limit": Row("memory_limit: none on {0}; 1000000 on {1}", other={"memory_limit": 1_000_000}),
    "collective matmul": Row("collective_matmul: off on {0}; ring on {1}", other={"collective_matmul": "ring"}),
    "another step": Row("what comes next: {0} is about to run step 'step'; {1} is about to run step 'evaluation'"),
    "DHELIX that means nothing": Row("stopped before all", around=environment(DHELIX="of")),
}


def squared_error(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """A scan over layers, so that there is a forward and a backward loop."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return jnp.mean((jax.lax.scan(layer, batch["x"], w)[0] - batch["y"]) ** 2)


def train_step(w: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    loss, gradients = value_and_grad(squared_error)(w, batch)
    return w - 0.1 * gradients, loss


def join(process: int, port: str, **options: Any) -> None:
    """Makes this process one of two."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, **options)


def arguments(rows: int = 16) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weights and a batch over the devices of all processes."""
    mesh = jax.make_mesh((len(jax.devices()),), ("dp",), axis_types=(AxisType.Auto,))
    random = np.random.RandomState(0)

    def put(value: np.ndarray, *spec: str) -> jax.Array:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    w = put(random.standard_normal((3, 8, 8)).astype(np.float32) / 3)
    return w, {name: put(random.standard_normal((rows, 8)).astype(np.float32), "dp") for name in "xy"}


def decorated(name: str = "step", **options: Any) -> Any:
    def step(w: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return train_step(w, batch)

    step.__name__ = name
    return strand_interleave(**{"microbatches": 2, **options})(step)


@contextlib.contextmanager
def told(result: list[Any]) -> Iterator[None]:
    """Adds to `result` what a process is told that stops inside, when it came, and when it knew."""
    came = time.time()
    try:
        yield
        result.append(["nothing", came, time.time()])
    except DhelixError as error:
        result.append([f"{type(error).__name__}: {error}", came, time.time()])


def main(process: int, port: str) -> None:
    join(process, port)
    given = arguments()
    found: list[Any] = []
    for name, row in TABLE.items():
        options = {**row.common, **(row.other if process else {})}
        with (row.around if process else nullcontext)(), told(found):
            decorated("evaluation" if process and name == "another step" else "step", **options)(*given)
    step = decorated()
    w, batch = given
    losses = []
    for _ in range(3):
        w, loss = step(w, batch)
        losses.append(float(loss))
    print(json.dumps([found, losses]))


def write_plan(path: Path) -> None:
    pairing_plan_json.save(PLAN, path)
