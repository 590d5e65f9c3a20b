"""A small Llama over 20 steps of SGD with momentum: every structure that a schedule makes equals the plain step.

An error in a carried state or in the order of micro-batches may be rounded away in one step, but grows in 20. AdamW
would amplify rounding errors, because it divides small gradients by their size. CPU devices ignore the order of
operators; `benchmarks/strands/run.py --check_steps 20` checks all orders on GPUs.

Pairings that leave two loops of one direction apart run on one device. XLA's CPU runtime, unlike GPUs, runs independent
loops at the same time and mixes up their collectives of the same kind, which stops the process.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from dhelix.models import LlamaConfig, Training, make_mesh, make_train_step
from dhelix.passes.strands.strand_duplication import PAIRINGS, StrandDuplication
from dhelix.runtime.step.pass_lists import strand_passes
from dhelix.runtime.step.strand_interleave import strand_interleave

STEPS, MICROBATCHES = 20, 3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-8}
"""Relative. float32: additions in another order over 20 steps; bfloat16: one rounding."""
OPTIONS = {
    "xla_backend_optimization_level": 0,  # compiles fast; LLVM's optimizations are not compared
    "xla_allow_excess_precision": False,  # otherwise each fusion of bfloat16 chooses where to round
}

Numbers = dict[str, np.ndarray]


@functools.cache
def training(dtype: str, scan_layers: bool, devices: int) -> Training:
    config = LlamaConfig(
        vocab=64, hidden=32, layers=2, heads=4, kv_heads=4, head_dim=8, ffn=48, seq=16,
        dtype=dtype, param_dtype="float32", scan_layers=scan_layers,
    )  # fmt: skip
    return make_train_step(config, make_mesh(1, devices), optax.sgd(0.1, momentum=0.9), MICROBATCHES)


@functools.cache
def run(dtype: str, scan_layers: bool, devices: int, pairing: str | None) -> tuple[Numbers, set[str]]:
    """Losses, norms of gradients and the final parameters, and the names of the passes that changed the step."""
    made = training(dtype, scan_layers, devices)
    if pairing is None:
        step: Any = jax.jit(made.train_step, donate_argnums=0, compiler_options=OPTIONS)
    else:
        passes = (StrandDuplication(pairing=pairing), *strand_passes()[1:])
        step = strand_interleave(made.train_step, donate_argnums=0, passes=passes, compiler_options=OPTIONS)
    random, state = np.random.default_rng(0), made.init(jax.random.key(0))
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        tokens = (random.integers(0, 64, (MICROBATCHES, 1)) + np.arange(17)) % 64  # a sequence that can be learned
        batch = {"tokens": jax.device_put(tokens.astype(np.int32), made.batch_sharding)}
        state, metrics = step(state, batch)
        for name, values in found.items():
            values.append(float(metrics[name]))
    numbers = {name: np.asarray(values) for name, values in found.items()}
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    numbers |= {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in leaves}
    changed = set() if pairing is None else {e.name for e in step.report(made.abstract_state(), batch) if e.changed}
    return numbers, changed


CASES = (
    *(
        (dtype, True, 2 if pairing in ("forward-backward", "same-direction") else 1, pairing)
        for pairing in PAIRINGS
        for dtype in (TOLERANCE if pairing == "forward-backward" else ("float32",))
    ),
    ("float32", False, 2, "forward-backward"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scan_layers", "devices", "pairing"), CASES)
def test_results_of_twenty_steps_are_the_plain_steps(dtype: str, scan_layers: bool, devices: int, pairing: str) -> None:
    (expected, _), (actual, changed) = (run(dtype, scan_layers, devices, which) for which in (None, pairing))
    assert "strand-duplication" in changed
    for name, values in expected.items():
        scale = np.max(np.abs(values))
        difference = np.max(np.abs(values - actual[name]))
        assert difference <= TOLERANCE[dtype] * scale, name
    assert expected["loss"][-1] < expected["loss"][0]
