"""Predicts a step without overlap from a profile that was measured with fewer layers, and measures the step.

    python benchmarks/prediction/step_prediction.py profiles/data/h200-nvlink.json --layers 8 --out DIR

The step is compiled without XLA's latency-hiding scheduler, as the prediction assumes, and runs without a profiler.
Reports predicted and measured milliseconds, and the fraction of the predicted time per source (measured, interpolated,
guess).
"""

import argparse
import json
import statistics
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--setting", default="default")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    arguments = parser.parse_args()

    import jax
    import numpy as np
    import optax

    from dhelix.models import preset
    from dhelix.models.common.mesh import make_mesh
    from dhelix.models.train_step import make_train_step
    from dhelix.passes.evaluation import step_time
    from dhelix.passes.evaluation.costs import Costs
    from dhelix.profiles import hardware
    from dhelix.profiles.estimates.estimator import Estimator
    from dhelix.profiles.files import storage
    from dhelix.runtime.compiler.lowering import compiled_module
    from dhelix.runtime.profiling.observe import NO_GRAPHS
    from dhelix.runtime.profiling.traces.step_trace import UNSCHEDULED

    profile = storage.load(arguments.profile)
    described = hardware.describe(profile.hardware, profile.link)
    estimator = Estimator(profile, described, arguments.setting)
    results = []
    for layers in arguments.layers:
        config = preset(arguments.preset, layers)
        training = make_train_step(
            config, make_mesh(1, arguments.tp), optax.adamw(1e-4), microbatches=arguments.microbatches
        )
        shape = (arguments.microbatches, config.seq + 1)
        tokens = np.random.default_rng(0).integers(0, config.vocab, shape, "int32")
        batch = {"tokens": jax.device_put(tokens, training.batch_sharding)}
        state = training.init(jax.random.key(0))
        compiled = (
            jax.jit(training.train_step, donate_argnums=0).lower(state, batch).compile({**NO_GRAPHS, **UNSCHEDULED})
        )
        gap = estimator.section.gap_seconds or 0.0
        predicted = step_time.predict(compiled_module(compiled), Costs(described, estimator), gap)
        seconds = []
        for _ in range(arguments.steps + 1):
            start = time.perf_counter()
            state, _ = compiled(state, batch)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - start)
        measured = statistics.median(seconds[1:])
        results.append(
            {
                "preset": arguments.preset,
                "layers": layers,
                "predicted_ms": 1e3 * predicted.seconds,
                "measured_ms": 1e3 * measured,
                "error": predicted.seconds / measured - 1,
                "shares": {source.value: share for source, share in predicted.shares.items()},
            }
        )
        print(json.dumps(results[-1]), flush=True)
        del state, compiled
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"profile": arguments.profile.name, "setting": arguments.setting, "results": results}
    (arguments.out / "step_prediction.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
