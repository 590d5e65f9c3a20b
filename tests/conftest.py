"""JAX for the tests: 8 CPU devices, and beside them the CUDA plugin, which compiles for GPUs without one.

One process does both: with `JAX_PLATFORMS=cpu,cuda` the CPU devices are the default, and a plugin that finds
no GPU stays out of the way. All of it must be set before jax is imported, hence at the top of this file.
"""

import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_plugin = importlib.util.find_spec("jax_cuda13_plugin") is not None
os.environ["JAX_PLATFORMS"] = "cpu,cuda" if _plugin else "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
# Two workers keep both cores busy: a program for CPU in one piece compiles in 8 % less time than in 32. A flag that the
# caller gives stands last, and so wins.
# XLA makes one function of a loop that touches little memory, and on some processors products in it round otherwise:
# strands, whose loops are larger, would then differ in the last bit.
_flags = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_disable_hlo_passes=small-while-loop-hoisting "
)
os.environ["XLA_FLAGS"] = _flags + os.environ.get("XLA_FLAGS", "")
if _plugin and not list(Path("/dev").glob("nvidia[0-9]*")):
    # Machine code of GPU kernels takes two thirds of a compilation, and most programs share most of theirs: it is made
    # once, where nothing looks at it. On GPUs a second program with kernels of the first one stops the process. Last,
    # because pytest-xdist's workers inherit the flag of the process that starts them, and no two may write one file.
    _kernels = tempfile.TemporaryDirectory(prefix="dhelix-test-kernels-")
    os.environ["XLA_FLAGS"] += f" --xla_gpu_kernel_cache_file={_kernels.name}/kernels"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

ROOT = Path(__file__).parent.parent
LAYERS = ("passes", "profiles", "runtime", "models", "launch")

# The same examples in every run: a failure in CI is a failure at home. Compiling outlasts any deadline.
hypothesis.settings.register_profile("dhelix", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dhelix")


@pytest.fixture(scope="session", autouse=True)
def cpu_devices() -> None:
    """JAX reads the flags above when it first looks for devices, and by then a test may have changed them."""
    jax.devices("cpu")


def pytest_collection_finish() -> None:
    """Tracing allocates so much that Python looks for garbage all the time: not in modules, and less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def one_name_per_module() -> Iterator[None]:
    """Fails when something imported `passes` for `dhelix.passes`: one file twice, two sets of classes."""
    yield
    twins = sorted(set(LAYERS) & sys.modules.keys())
    assert not twins, f"imported without `dhelix.`: {twins}"
