"""A step with a reference model, compiled without a GPU, and the table that compares it with a step without one."""

from dataclasses import replace

import pytest

from dhelix.benchmarks.programs.policy_and_reference import Row, compiled, make_step, table
from dhelix.launch.plan import search as plan_search
from dhelix.models import preset
from dhelix.passes.evaluation.costs import CostModel
from dhelix.profiles.files import storage
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.step.options import StepOptions

MEMORY = 1.03  # largest temporaries of strands, relative to the plain step's


@pytest.mark.slow
def test_three_bodies_are_two_strands_within_the_memory_of_the_plain_step() -> None:
    sizes = {"hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 4096, "vocab": 8192, "seq": 4096}
    config = preset("llama-8b", 2, remat="full", attention="cudnn", **sizes)
    mesh = deviceless.mesh({"dp": 1, "tp": 4}, "h200")
    step, arguments = make_step(config, mesh, 3, with_reference=True)
    plain, _ = compiled(step, arguments, "H200", mesh, strands=False)
    both, merged = compiled(step, arguments, "H200", mesh, strands=True)
    assert len(merged) == 1 and merged[0].count(" + ") == 2 and merged[0].endswith(" x 2")
    profile = storage.find("H200", "nvlink")
    assert profile is not None
    found = plan_search.search(
        both, CostModel(profile, "connections1"), StepOptions(), plan_search.MemoryLimit.of(None, plain)
    )
    assert plain.memory is not None and both.memory is not None
    assert both.memory.temporaries <= MEMORY * plain.memory.temporaries
    strands = {operator.name.partition(" ")[0] for operator in found.plan.bodies[0].operators}
    assert strands == {"alpha", "beta"}, "an order of both was found"


def test_the_table_compares_exposed_communication() -> None:
    alone = Row("H200", "nvlink", "default", 4, 8, 4, False, True, 100.0, 30.0, 10.0, 1.0)
    rows = [alone, replace(alone, reference=True, step=130.0, exposed=11.0)]
    line = "| 4 H200, nvlink, `default` | strands | 100.0, 10.0 ms | 130.0, 11.0 ms | 1.10 |"
    assert line in table(rows)
