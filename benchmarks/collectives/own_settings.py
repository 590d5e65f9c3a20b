"""Shows that equal collectives of one layer run under settings of their own in a real train step.

    NCCL_P2P_DISABLE=1 python benchmarks/collectives/own_settings.py --out own_settings.json

Without peer-to-peer, NCCL gives these collectives four channels. The settings here are not fast: every second
collective gets one channel, the others three. NCCL's own log says with how many channels each call ran. The losses of
the same steps under NCCL's defaults stand beside, twice: attention's backward pass adds up in any order, so equal
programs differ, too.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

_LINE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
STEPS = 4


def calls(log: Path) -> list[tuple[str, int, str, str, int]]:
    """Kind, bytes, algorithm, protocol and channels of each call in NCCL's log, in order, of the first GPU."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if "[0]" in line and (match := _LINE.search(line)):
            kind, size, algorithm, protocol, low, high = match.groups()
            found.append((kind, int(size), algorithm, protocol, int(high) - int(low) + 1))
    return found


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--seq", type=int, default=4096)
    made.add_argument("--preset", default="llama-8b")
    options = made.parse_args()
    folder = tempfile.mkdtemp(prefix="nccl-")
    log = Path(folder, "nccl.log")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING,COLL", "NCCL_DEBUG_FILE": str(log)}
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    results = measured(options, log)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


def measured(options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Trains with and without the settings. The environment must be set before jax is imported."""
    import jax

    from dhelix.launch.train import trainer
    from dhelix.passes.plans.plan import Plan
    from dhelix.passes.plans.tuned_collectives import identities
    from dhelix.passes.tuning.collective_settings import CollectiveSettings, TunedCollective
    from dhelix.profiles.channels.nccl_setting import NcclSetting
    from dhelix.profiles.hardware import gpu_name
    from dhelix.runtime.compiler.lowering import compiled_module
    from dhelix.runtime.processes.launch_settings import link_of, target_of
    from dhelix.runtime.profiling.provenance import nccl_version
    from dhelix.runtime.step.options import StepOptions
    from dhelix.runtime.tuning import tune_step

    tune_step.prepare()
    devices = len(jax.devices())
    given = trainer.Options(
        preset=options.preset, layers=options.layers, seq=options.seq, vocab=32_000, mesh=f"tp={devices}"
    )
    config = trainer.configuration(given)
    training, batch = trainer.make_training(given, config, jax.devices())
    tokens = jax.jit(
        lambda: {"tokens": jax.random.randint(jax.random.key(1), (batch, config.seq + 1), 0, config.vocab)},
        out_shardings=training.batch_sharding,
    )()

    def losses(chosen: StepOptions) -> list[float]:
        step, state, found = trainer.make_step(training, False, chosen), training.init(jax.random.key(0)), []
        for _ in range(STEPS):
            state, metrics = step(state, tokens)
            found.append(float(metrics["loss"]))
        return found

    gpu = gpu_name(jax.devices()[0].device_kind)
    target = target_of(gpu, link_of(os.environ), devices, None)
    state = training.init(jax.random.key(0))
    lowered = trainer.make_step(training, False, StepOptions()).lower(state, tokens)
    del state
    module = compiled_module(lowered.compile())
    rows = tuple(
        TunedCollective(*identity, NcclSetting("ring", "simple", 1 + 2 * (n % 2)))
        for n, identity in enumerate(dict.fromkeys(identities(module, target).values()))
    )
    version = ".".join(nccl_version().split(".")[:2])
    plan = Plan("own settings", target, tuning=CollectiveSettings(version, devices, rows, 1.0, 1.0))

    under_defaults = losses(StepOptions())
    before = len(calls(log))
    under_settings = losses(StepOptions(tuning=plan))
    every = calls(log)
    again = losses(StepOptions())
    return {
        "gpu": gpu,
        "nccl": nccl_version(),
        "settings": [[*row.identity, row.setting.channels] for row in rows],
        "losses": {"defaults": under_defaults, "settings": under_settings, "defaults again": again},
        "calls": {
            "defaults": _counted(every[:before]),
            "settings": _counted(every[before:]),
            "in order": every[before:][-24:],
        },
    }


def _counted(found: list[tuple[str, int, str, str, int]]) -> list[Any]:
    return [[*call, count] for call, count in sorted(collections.Counter(found).items())]


if __name__ == "__main__":
    main()
