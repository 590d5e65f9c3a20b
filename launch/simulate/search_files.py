"""What `dhelix simulate --search --out FOLDER` writes: how to run the best choice.

launch.sh      the command for each node, with the plan if there is one
plan.json      the order of operators for this cluster, and how states are sharded
search.json    all results
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from dhelix.errors import DhelixError
from dhelix.launch.plan import program as plan_program
from dhelix.launch.plan import search as order_search
from dhelix.launch.simulate.search_tables import SearchView
from dhelix.launch.train.options import Options
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan
from dhelix.runtime.compiler import memory_need
from dhelix.runtime.step.options import StepOptions

_SCRIPT = """\
#!/bin/sh
# {headline}
# Made by `dhelix simulate --search`. With several nodes, start it on each of them (docs/guide/launch.md).
set -e
{memory}exec {command} "$@"
"""


def folder(path: str) -> Path:
    """The folder, which is made if it is missing. Raises DhelixError if that is impossible."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DhelixError(f"--out {path}: cannot make this folder ({error.strerror}); give another one") from None
    return Path(path)


def write(into: Path, view: SearchView, headline: str, model: CostModel) -> list[str]:
    """Writes the files, and returns their paths.

    Args:
      model: costs of the cluster, for the plan.

    Raises:
      DhelixError: the step has no plan, because no order keeps to its memory limit.
    """
    names, best = ["launch.sh", "search.json"], view.best
    command = view.command
    if best.choice.system == "strands":
        plan_files.save(plan_of(view.options, view.cluster.gpu.lower(), model), into / "plan.json")
        command += ' --plan "$(dirname "$0")/plan.json"'
        names.insert(1, "plan.json")
    assert best.step is not None
    memory = ""
    if best.step.memory > memory_need.SHARE_OF_PROCESS * view.cluster.hardware.memory_bytes:
        memory = "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.93 # the step needs more than JAX's three quarters\n"
    (into / "launch.sh").write_text(_SCRIPT.format(headline=headline, memory=memory, command=command))
    (into / "launch.sh").chmod(0o755)
    (into / "search.json").write_text(json.dumps(view.to_json(), indent=1) + "\n")
    return [str(into / name) for name in names]


def plan_of(options: Options, target: str, model: CostModel) -> Plan:
    """The plan of a step with two strands: its order, searched with the costs of the cluster, and its sharding."""
    plain = plan_program.of_preset(dataclasses.replace(options, plain=True), target=target)
    strands = plan_program.of_preset(options, target=target, like=plain)
    limit = order_search.MemoryLimit.of(None, plain)
    found, _ = order_search.with_room(
        lambda limit: order_search.search(strands, model, StepOptions(), limit),
        limit,
        int(model.hardware.memory_bytes),
        lambda _: None,
    )
    return plan_program.with_states(found.plan, options)
