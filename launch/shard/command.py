"""`dhelix shard`: chooses factors of model states, and shows what they cost beside all others.

    dhelix shard --model llama-7b --cluster amsp-a800 --nodes 128 --gpus_per_node 8

`passes/sharding/planner.py` chooses. docs/guide/sharding.md explains the choice and its limits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import Any

from absl import flags
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.shard import chart, live, tables
from dhelix.launch.shard.flags import ONLY_LIVE, WITHOUT_LIVE
from dhelix.launch.shard.job import Task, task_of
from dhelix.launch.shard.placed import placed_by
from dhelix.launch.shard.view import ShardView, factors_of
from dhelix.launch.shown import json_output
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.passes.sharding.groups import plan_groups
from dhelix.passes.sharding.planner import baselines, evaluate, plan
from dhelix.profiles.hardware import ALL, Hardware


def run(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs `dhelix shard` and returns its exit status. Raises DhelixError if the command fails."""
    chosen: dict[str, Any] = values.flag_values_dict()
    _check_given(chosen["live"], [name for name in chosen if values[name].present])
    target = json_output.target(chosen["json"], arguments, "shard")
    view = view_of(chosen)
    to_stdout = target == "-"
    console = Console(stderr=to_stdout, width=None if sys.stdout.isatty() else 160, highlight=False)
    text = json.dumps(view.to_json(chosen["top"]), indent=1)
    if chosen["chart"]:
        chart.save(view, chosen["chart"], f"{view.task.job.sizes.name} on {view.task.mesh} GPUs")
    if chosen["out"]:
        plan_files.save(plan_of(view), chosen["out"])
    if to_stdout:
        print(text)
    else:
        tables.print_view(view, console, chosen["top"])
    if target and not to_stdout:
        json_output.write(target, f"{text}\n")
    for name in (chosen["chart"], chosen["out"], None if to_stdout else target):
        if name:
            console.print(f"wrote {name}", soft_wrap=True, markup=False)
    return 0


def _check_given(live: bool, given: Collection[str]) -> None:
    """Raises DhelixError if a flag was given that has no effect with `--live`, or without it."""
    for name in given:
        if live and name in WITHOUT_LIVE:
            raise DhelixError(f"--live takes the step of `dhelix train`, so --{name} has no effect; leave it out")
        if not live and name in ONLY_LIVE:
            raise DhelixError(f"--{name} describes a step of `dhelix train`; add --live, or leave it out")
    if "groups" in given and "factors" in given:
        raise DhelixError(
            "--groups chooses factors for each group, and --factors says one choice for all; leave one out"
        )
    if "axes" in given and "out" not in given:
        raise DhelixError("--axes names the mesh axes of a plan file; add --out, or leave it out")


def view_of(chosen: dict[str, Any]) -> ShardView:
    """The planner's result for the flags.

    Raises:
      DhelixError: nothing fits, factors do not divide each other, or `--strict` and a time was not measured.
    """
    task, here = live.task_of(chosen) if chosen["live"] else (task_of(chosen), None)
    objective = chosen["objective"]
    if chosen["groups"]:
        return _of_groups(task, chosen)
    planned = plan(task.job, task.mesh, task.times, task.limit, task.overlap, objective, task.choices)
    if here is not None:
        task, planned = live.compared(task, planned, here, chosen)
    shown = planned.best
    if chosen["factors"]:
        factors = factors_of(chosen["factors"], task.mesh)
        shown = evaluate(task.job, factors, task.times, task.overlap)
        if shown.memory.total > task.limit:
            raise DhelixError(
                f"--factors: {factors} {planned.why(shown)}; the planner's choice: {planned.best.factors}"
            )
    if chosen["strict"]:
        _check_measured(task, shown.times.guessed, shown.times.scaled)
    known = baselines(task.job, task.mesh, task.times, task.overlap)
    placed = placed_by(chosen["topology"], [shown.factors], shown.times.sent) if chosen["topology"] else None
    return ShardView(task, planned, shown, known, placed, tuple(chosen["axes"]) or task.axes)


def _of_groups(task: Task, chosen: dict[str, Any]) -> ShardView:
    """The planner's result for groups of parameters."""
    found = plan_groups(task.job, task.groups, task.times, task.limit, task.overlap, chosen["objective"])
    if chosen["strict"]:
        _check_measured(task, found.best.times.guessed, found.best.times.scaled)
    each = [candidate.factors for candidate in found.of_group.values()]
    placed = placed_by(chosen["topology"], each, found.best.times.sent) if chosen["topology"] else None
    return ShardView(task, found.alike, found.best, found.known, placed, tuple(chosen["axes"]) or task.axes, found)


def plan_of(view: ShardView) -> Plan:
    """A plan file's contents: the sharding section, with a target and no order."""
    task = view.task
    sizes, batch = task.job.sizes, task.job.batch
    parts = f"{batch.microbatches} micro-batch{'es' * (batch.microbatches > 1)}"
    program = f"{sizes.name}: {sizes.layers} layers, sequence {batch.length}, {parts}"
    target = PlanTarget.of(_plain_name(task.hardware), task.link, task.setting, task.mesh.gpus)
    return Plan(program, target, sharding=view.plan)


def _plain_name(hardware: Hardware) -> str:
    """The name of the GPU without that of its link."""
    return next((name for name in ALL if hardware.name.startswith(f"{name}-")), hardware.name)


def _check_measured(task: Task, guessed: float, scaled: float) -> None:
    if guessed + scaled > 0.0:
        raise DhelixError(
            f"--strict: {guessed:.0%} of the communication's time is guessed and {scaled:.0%} is scaled from other "
            f"meshes or sizes (from {task.source}); measure the mesh {task.mesh} with `dhelix profile`"
        )
