"""Two processes: decoration initializes no device, and a step with arrays over both runs and verifies."""

from __future__ import annotations

from dhelix.tests.runtime import job

_PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.steps import squared_error
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad

@strand_interleave(microbatches=2, donate_argnums=0, verify=True, strict=True)
def step(w, batch):
    loss, grads = value_and_grad(squared_error)(w, batch)
    return w - 0.1 * grads, loss

jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))  # fails once devices are known
mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

def put(value, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

random = np.random.RandomState(0)
w = put(random.standard_normal((3, 8, 8)).astype(np.float32) / 3)
batch = {name: put(random.standard_normal((16, 8)).astype(np.float32), "dp") for name in "xy"}
losses = []
for _ in range(3):
    w, loss = step(w, batch)
    losses.append(float(loss))
report = step.report(w, batch)
assert report["strand-duplication"].changed and report.collective_fingerprint
print(losses, report.fingerprint, report.collective_fingerprint)
"""


def test_two_processes() -> None:
    lines = [output.splitlines()[-1] for output in job.outputs(_PROGRAM, devices=2)]
    assert lines[0] == lines[1] and lines[0].startswith("[1.1")
