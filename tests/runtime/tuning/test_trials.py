"""Tuning a step in its process: a program on CPU devices, whose kernels and NCCL's questions are made up."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dhelix
from dhelix.errors import DhelixError
from dhelix.passes.analysis.execution import counted_trips, sequence_of
from dhelix.passes.hlo import Computation, HloModule
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import OrderSection, Plan, PlanTarget
from dhelix.passes.tuning.launch_order import questions, sequences
from dhelix.runtime.processes import agreement
from dhelix.runtime.profiling.traces import executions
from dhelix.runtime.profiling.traces.executions import Execution
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.runtime.tuning import in_effect, plugin, trials, tune_step
from dhelix.runtime.tuning.plugin import Asked, Counts, TunerError
from dhelix.runtime.tuning.tuned import as_json

KERNEL = 1e-3
"""Seconds of each kernel, and of a collective with one channel. Computation is not slowed down."""


class Nccl:
    """Plays the plugin and NCCL. It asks in the program's order, unless `odd` is set."""

    def __init__(self) -> None:
        self.tables: list[str] = []
        self.module: HloModule | None = None
        self.odd = self.unused = False

    def load(self, table: str) -> None:
        self.tables.append(table)

    def record(self, _: int) -> None:
        pass

    def recorded(self) -> Sequence[Asked]:
        assert self.module is not None
        found = [
            Asked(n, 2, question.kind, question.bytes, True)
            for n, each in enumerate(sequences(self.module).values())
            for question in each
        ]
        return found[1:] if self.odd else found

    def counts(self) -> Counts:
        return Counts(0 if self.unused else 2, 1, 1, 1, 0)

    def channels(self) -> int:
        """Channels of the first collective that has a setting; 8 by default."""
        lines = [line.split() for line in self.tables[-1].splitlines() if line != "sequence"]
        return next((int(line[5]) for line in lines if line[5] != "0"), 8)

    def kernels(self, run: Callable[[], object], name: str) -> list[list[Execution]]:
        """What a trace of two GPUs says, on each of which three steps run one kernel after the other."""
        run()
        assert self.module is not None and name == self.module.name
        gpu: list[Execution] = []
        now = 0.0
        for _ in range(3):
            for instruction in _running(self.module.entry):
                asked = bool(questions(instruction))
                seconds = KERNEL * (10.0 / self.channels() if asked else 1.0)
                gpu.append(Execution(instruction.name, now, now + seconds))
                now += seconds
        return [gpu, gpu]


def _running(computation: Computation) -> Iterator[Any]:
    for instruction in sequence_of(computation):
        if instruction.opcode in CONTROL_FLOW:
            for _ in range(counted_trips(instruction)):
                yield from _running(instruction.called[0])
        elif instruction.opcode in ("fusion", "dot") or questions(instruction):
            yield instruction


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    made = Nccl()
    monkeypatch.setattr(plugin, "install", lambda: made)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tune_step, "nccl_version", lambda: "2.28.9")
    monkeypatch.setattr(executions, "record_everywhere", made.kernels)
    original = trials.compiled_module

    def compiled_module(compiled: Any) -> HloModule:
        made.module = original(compiled)
        return made.module

    monkeypatch.setattr(trials, "compiled_module", compiled_module)
    return made


def step_and_arguments(donate: bool = True) -> tuple[Any, tuple[Any, ...]]:
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",))
    weights = jax.device_put(jnp.eye(16) * 0.5, NamedSharding(mesh, P(None, "tp")))
    batch = jax.device_put(jnp.ones((4, 16)), NamedSharding(mesh, P()))

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.lax.all_gather(x @ w, "tp", axis=1, tiled=True))

    def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def apply(w: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, 5, lambda _, x: layer(w, x), x)

        out = jax.shard_map(apply, mesh=mesh, in_specs=(P(None, "tp"), P()), out_specs=P(), check_vma=False)(w, x)
        return w * 0.9, jnp.sum(out)

    return strand_interleave(train_step, passes=(), donate_argnums=0 if donate else ()), (weights, batch)


def test_a_step_is_tuned_in_its_process(nccl: Nccl, tmp_path: Path) -> None:
    step, arguments = step_and_arguments()
    told: list[str] = []
    out = tmp_path / "tuned.json"
    tuned = dhelix.tune(step, *arguments, out=out, progress=told.append, records=tmp_path / "records", minutes=5)
    (body,) = tuned.bodies
    assert body.runs == 5 and len(body.collectives) == 1
    assert body.default.collectives == pytest.approx((10.0 * KERNEL / 8,))
    assert body.default.whole == pytest.approx(sum(body.default.collectives) + sum(body.default.computations))
    settings = tuned.found.candidates["dhelix"]
    assert {one.channels for one in settings.values()} == {32}  # the most channels are fastest, as nothing is slowed
    assert plan_files.load(out) == tuned.plan and tuned.plan.target.link == "nvlink"
    assert told[0] == "compiles the step" and json.dumps(as_json(tuned))
    assert re.match(r"(nothing gains|1 collectives have settings): ", str(tuned))
    assert math.isfinite(tuned.gain) and arguments[0].is_deleted() is False
    assert tuned.plan.tuning is not None and tuned.plan.tuning.devices == 2 < len(jax.devices())
    assert nccl.tables[-1] == ""  # afterwards, the process has the settings that it had before


@pytest.mark.parametrize("refused", [False, True])
def test_the_step_is_tuned_again_in_another_order(
    nccl: Nccl, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, arguments = step_and_arguments()

    class Other:
        """The same step, as if it were in another order."""

        def __init__(self, step: Any, arguments: Any, plan: Plan, told: Callable[[str], None]) -> None:
            self._arguments = arguments

        def ordered(self, plan: Plan) -> tuple[Plan, list[str]]:
            assert plan.tuning is not None
            return replace(plan, order=OrderSection(skew=1)), [one.body for one in plan.tuning.collectives]

        def step(self, plan: Plan) -> Any:
            return step_and_arguments()[0]

        def check(self, step: Any) -> None:
            if refused:
                raise DhelixError("the new order is refused: it needs more memory")

    monkeypatch.setattr(tune_step, "Reordering", Other)
    programs = itertools.count(1)

    def seconds(self: Any, settings: Any) -> float:
        """Each program is faster than the one before, and each is faster with settings."""
        return (0.9 if settings else 1.0) / vars(self).setdefault("number", next(programs))

    monkeypatch.setattr(trials.StepTrials, "seconds", seconds)
    out = tmp_path / "tuned.json"
    tuned = dhelix.tune(step, *arguments, out=out, minutes=5)
    if refused:
        assert len(tuned.iterations) == 1 and "the order of round 1 stays: the new order is refused" in str(tuned)
    else:
        assert len(tuned.iterations) > 1 and tuned.iterations[1].kept
        assert tuned.plan.order.skew == 1 and tuned.plan.order.memory_limit > 0
    assert plan_files.load(out) == tuned.plan and nccl.tables[-1] == "" and arguments[0].is_deleted() is False


@pytest.mark.slow
def test_a_program_is_found_again_whatever_was_compiled_before_it(nccl: Nccl) -> None:
    keys = set()
    for _ in range(2):
        jax.clear_caches()
        step, arguments = step_and_arguments()
        keys.add(trials.StepTrials(step.lower(*arguments), arguments, PlanTarget()).key)
    assert len(keys) == 1


def test_a_state_whose_shardings_come_back_written_otherwise_is_used_up(nccl: Nccl) -> None:
    """Of two shardings that place alike, JAX returns one. A mesh axis of one device may come and go."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]).reshape(2, 1), ("dp", "tp"))
    specs = P("dp", "tp"), P(("tp", "dp"))

    def step(state: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        sums = jax.shard_map(lambda *parts: jax.lax.psum(sum(w.sum() for w in parts), ("dp", "tp")), mesh=mesh,
                             in_specs=specs, out_specs=P())  # fmt: skip
        return tuple(w * 0.9 for w in state), sums(*state)

    state = tuple(jax.device_put(jnp.eye(16), NamedSharding(mesh, spec)) for spec in specs)
    returned = jax.jit(step)(state)[0]
    assert [w.sharding for w in returned] != [w.sharding for w in state]
    made = strand_interleave(step, passes=(), donate_argnums=0)
    tuned = tune_step.tune(made, state, minutes=0.0, use_up=True)
    assert tuned.seconds and state[0].is_deleted()


def test_a_step_with_a_static_argument_is_tuned(nccl: Nccl) -> None:
    step, arguments = step_and_arguments()
    made = strand_interleave(lambda n, *rest: step.__wrapped__(*rest), passes=(), static_argnums=0, donate_argnums=1)
    assert dhelix.tune(made, 3, *arguments, minutes=0.0).seconds


def test_processes_with_unlike_tables_stop_together(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(purpose: str, text: str) -> list[str]:
        return [text, "another" if purpose.startswith("set the collectives") else text]

    step, arguments = step_and_arguments()
    monkeypatch.setattr(agreement, "gathered", gathered)
    with pytest.raises(DhelixError, match="the processes would set the collectives differently"):
        dhelix.tune(step, *arguments)


def test_a_given_plan_names_the_variables_of_the_process_that_tuned_it(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_BUFFSIZE", "262144")
    step, arguments = step_and_arguments()
    given = Plan("a step", PlanTarget.of("H100", "nvlink", "default", 2))
    tuned = dhelix.tune(step, *arguments, plan=given, minutes=0.0)
    assert dict(tuned.plan.target.environment)["NCCL_BUFFSIZE"] == "262144" and tuned.plan.target.gpus_per_node == 2


def test_what_cannot_be_tuned_is_one_clear_error(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DhelixError, match="runs on one device"):
        dhelix.tune(lambda x: 2 * x, jnp.ones(2))
    with pytest.raises(DhelixError, match="takes arrays as arguments"):
        dhelix.tune(lambda x, _: 2 * x, jnp.ones(2), object())
    monkeypatch.setattr(tune_step, "nccl_version", lambda: "")
    with pytest.raises(DhelixError, match="the version of NCCL is unknown"):
        dhelix.tune(lambda x: 2 * x, jnp.ones(2))


def test_if_nccl_asks_otherwise_the_first_difference_is_said(nccl: Nccl) -> None:
    step, arguments = step_and_arguments()
    nccl.odd = True
    with pytest.raises(
        DhelixError, match="question 5 of 4 is the end of the step, where the program has all-gather of"
    ):
        dhelix.tune(step, *arguments)


def test_if_nccl_does_not_use_the_plugin_the_error_says_why(nccl: Nccl) -> None:
    step, arguments = step_and_arguments(donate=False)
    nccl.unused = True
    with pytest.raises(TunerError, match="made its communicators before"):
        dhelix.tune(step, *arguments)


def test_a_first_step_that_fails_leaves_the_settings_of_the_process(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, arguments = step_and_arguments(donate=False)
    monkeypatch.setattr(in_effect, "_tables", {("step 1", "a table"): "a table"})
    nccl.unused = True
    with pytest.raises(TunerError):
        dhelix.tune(step, *arguments)
    assert nccl.tables[-1] == "a table" and len(nccl.tables) == 2


def test_without_gpus_the_error_says_so() -> None:
    step, arguments = step_and_arguments()
    with pytest.raises(DhelixError, match="tuning needs GPUs, but this process runs on cpu"):
        dhelix.tune(step, *arguments)
