"""Two processes: decoration starts no device, and a step with arrays over both runs and verifies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

_PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from dhelix.runtime.strand_interleave import strand_interleave
from dhelix.tests.runtime.steps import squared_error
from dhelix.runtime.value_and_grad import value_and_grad

@strand_interleave(microbatches=2, donate_argnums=0, verify=True, strict=True)
def step(w, batch):
    loss, grads = value_and_grad(squared_error)(w, batch)
    return w - 0.1 * grads, loss

jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))  # fails once devices are known
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, port, str(process)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    lines = [output.splitlines()[-1] for output, _ in outputs]
    assert lines[0] == lines[1] and lines[0].startswith("[1.1")
