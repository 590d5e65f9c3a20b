"""All processes of a job profile a step together; here two on CPU with a fake measurer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhelix.profiles.files import storage
from dhelix.profiles.profile import Profile, Provenance
from dhelix.tests.runtime import job

PROCESS = """
import json, sys
import jax
process, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
import jax.numpy as jnp
from dhelix.errors import DhelixError
from dhelix.profiles.profile import Provenance
from dhelix.runtime.profiling import in_process
from dhelix.runtime.profiling.measure import Sample
from dhelix.runtime.step.strand_interleave import strand_interleave

class Measurer:
    def measure(self, items, repeats):
        return [(Sample(1e-4, 1e-4, 1e-4 if item.second else 0.0),) * repeats for item in items]

jax.default_backend = lambda: "gpu"
in_process.provenance = lambda: Provenance("NVIDIA H200", 2, machine=f"of process {process}")
in_process.gpu_measurer = lambda *_: Measurer()
outcomes = []
for name, rows in (("same", 64), ("other", 32 * (process + 1)), ("damaged", 64)):
    step = strand_interleave(lambda state, batch: state + jnp.sin(batch @ batch), passes=[])
    shape = jax.ShapeDtypeStruct((rows, rows), jnp.float32)
    try:
        found = step.profile(shape, shape, out=f"{folder}/{process}/{name}.json", progress=False)
        outcomes.append(len(found.section("default").operators))
    except DhelixError as error:
        outcomes.append(str(error))
print(json.dumps(outcomes))
"""


@pytest.mark.slow
def test_processes_of_a_job(tmp_path: Path) -> None:
    known = Profile("H200", "nvlink", (Provenance("NVIDIA H200", 8, machine="of long ago"),))
    for process in ("0", "1"):
        (tmp_path / process).mkdir()
    storage.save(known, tmp_path / "0" / "same.json")
    (tmp_path / "1" / "damaged.json").write_text("{")
    told = [json.loads(output.splitlines()[-1]) for output in job.outputs(PROCESS, tmp_path)]
    same, other, damaged = told[0]
    assert told[0] == told[1]
    assert same > 0
    assert other.startswith("hosts disagree on operators to measure: ")
    assert "1/damaged.json" in damaged, "where one cannot read its file, all stop"
    first, second = (storage.load(tmp_path / process / "same.json") for process in ("0", "1"))
    assert first == second
    assert [p.machine for p in first.measured_on] == ["of long ago", "of process 0"]
