"""Times what `dhelix run` adds to the compilation of a step that has no loop over micro-batches.

    python benchmarks/programs/undecorated_look.py --out undecorated_look.json

The step is a small transformer on 8 CPU devices, with all gradients from one batch. Each row is a process of its own,
under `dhelix run`, and the fastest of RUNS. Seconds of dhelix are those of its report, without the compilation itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUNS = 3
STEP = """
import sys, time, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
layers, scanned = int(sys.argv[1]), sys.argv[2] == "scanned"
mesh = Mesh(np.array(jax.devices()), ("dp",))
sizes = dict(q=(64, 64), k=(64, 64), v=(64, 64), out=(64, 64), up=(64, 256), gate=(64, 256), down=(256, 64))
state = {n: jnp.full((layers, *s), 0.02) for n, s in sizes.items()}
state = jax.device_put(state, NamedSharding(mesh, P(None, "dp")))
norm = lambda y: y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
def layer(x, p):
    q, k, v = norm(x) @ p["q"], norm(x) @ p["k"], norm(x) @ p["v"]
    x = x + jax.nn.softmax(q @ k.mT) @ v @ p["out"]
    return x + (jax.nn.silu(norm(x) @ p["gate"]) * (norm(x) @ p["up"])) @ p["down"], None
def loss(state, x):
    if scanned:
        return jnp.mean(jax.lax.scan(layer, x, state)[0] ** 2)
    for n in range(layers):
        x, _ = layer(x, jax.tree.map(lambda w: w[n], state))
    return jnp.mean(x ** 2)
def train_step(state, x):
    value, grads = jax.value_and_grad(loss)(state, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value
lowered = jax.jit(train_step).lower(state, jax.device_put(jnp.ones((16, 64, 64)), NamedSharding(mesh, P("dp"))))
start = time.perf_counter()
lowered.compile()
print(time.perf_counter() - start)
"""


def measured(folder: Path, layers: int, how: str) -> dict[str, Any]:
    """One row. Raises CalledProcessError if the program fails."""
    script, report = folder / "step.py", folder / "report.json"
    script.write_text(STEP)
    command = [sys.executable, "-m", "dhelix", "run", "--quiet", "--report", report, script, str(layers), how]
    given = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(command, env=given, check=True, stdout=subprocess.PIPE, text=True)
    whole = float(done.stdout.split()[-1])
    (program,) = (one for one in json.loads(report.read_text())["programs"] if one["name"] == "jit_train_step")
    return {
        "layers": f"{layers}, {how}",
        "compilation s": round(whole - program["seconds"], 2),
        "dhelix ms": round(1e3 * program["seconds"], 1),
        "share": f"{program['seconds'] / (whole - program['seconds']):.2%}",
        "what dhelix says": program["why"][0].partition(";")[0],
    }


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    out = made.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for case in ((32, "scanned"), (32, "unrolled")):
            runs = [measured(Path(folder), *case) for _ in range(RUNS)]
            rows.append(min(runs, key=lambda row: row["dhelix ms"]))
    out.write_text(json.dumps({"date": str(datetime.date.today()), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
