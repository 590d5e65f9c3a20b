"""Sets up JAX for the tests: 8 CPU devices, and the CUDA plugin, which compiles for GPUs without having one.

Both live in one process. With `JAX_PLATFORMS=cpu,cuda` the CPU devices are the default, and a plugin that finds no GPU
does no harm. The variables must be set before jax is imported, so they stand at the top of this file.
"""

import datetime
import gc
import importlib.util
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

_plugin = importlib.util.find_spec("jax_cuda13_plugin") is not None
os.environ["JAX_PLATFORMS"] = "cpu,cuda" if _plugin else "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
# Two test workers keep both cores busy, so a CPU program compiles faster in one piece than in 32.
# XLA moves a small loop that touches little memory into a function of its own. On some processors, products in this
# function round differently. The loops of strands are larger, so their results would differ in the last bit.
# LLVM's optimizations of the tests' small programs would take longer than they save.
# The caller's flags come last, so they override these.
_flags = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_disable_hlo_passes=small-while-loop-hoisting --xla_backend_optimization_level=0 "
)
os.environ["XLA_FLAGS"] = _flags + os.environ.get("XLA_FLAGS", "")
if _plugin and not list(Path("/dev").glob("nvidia[0-9]*")):
    # Most of a compilation generates machine code for GPU kernels, and most programs share most of their kernels.
    # Without a GPU nothing runs this code, so each kernel is generated only once. With GPUs, a second program that
    # contains kernels of the first one stops the process. The flag comes last, because pytest-xdist's workers inherit
    # the flag of the process that starts them, and no two processes may write one file.
    _kernels = tempfile.TemporaryDirectory(prefix="dhelix-test-kernels-")
    os.environ["XLA_FLAGS"] += f" --xla_gpu_kernel_cache_file={_kernels.name}/kernels"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from absl import logging  # noqa: E402

ROOT = Path(__file__).parent.parent
BEGUN = pytest.StashKey[float]()  # when all tests were collected, in seconds of the monotonic clock
LAYERS = ("passes", "profiles", "runtime", "models", "launch")

# Every run uses the same examples, so a failure in CI can be reproduced. Compilation would exceed any deadline.
hypothesis.settings.register_profile("dhelix", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dhelix")


@pytest.fixture(scope="session", autouse=True)
def cpu_devices() -> None:
    """Makes JAX look for devices. JAX then reads the flags above, before a test can change them."""
    jax.devices("cpu")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A line that is logged once in a process is logged again in each test, and commands do not silence later tests.

    So the order of tests does not matter.
    """
    verbosity = logging.get_verbosity()
    if manager := sys.modules.get("dhelix.passes.framework.manager"):
        monkeypatch.setattr(manager, "_said", set())
    yield
    logging.set_verbosity(verbosity)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="K/N: run only each N-th of the slow tests, those of part K")
    parser.addoption("--minutes", type=float, help="skip the tests that are left so many minutes after the collection")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the slow tests of other parts. A test's part follows from its name, so each test is in one part.

    If the time is limited, the smoke tests come first, and then other files each day. So a machine that is too slow to
    run all tests runs all of them within some days.
    """
    if config.option.part is not None:
        part, parts = map(int, config.option.part.split("/"))
        other = [i for i in items if i.get_closest_marker("slow") and _number(i.nodeid) % parts != part % parts]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in set(other)]
    if config.option.minutes is not None:
        day = str(datetime.date.today())
        items.sort(key=lambda item: (item.get_closest_marker("smoke") is None, _number(f"{day} {item.path}")))


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Smoke tests always run, so that a run without any test cannot pass."""
    minutes = item.config.option.minutes
    over = minutes is not None and time.monotonic() > item.session.stash[BEGUN] + 60 * minutes
    if over and not item.get_closest_marker("smoke"):
        pytest.skip(f"not run: the {minutes:g} minutes of --minutes were over")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Reduces garbage collection, which would run very often during tracing. Modules are excluded from it."""
    session.stash[BEGUN] = time.monotonic()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def one_name_per_module() -> Iterator[None]:
    """Fails if a test imported `passes` instead of `dhelix.passes`: the same classes would then exist twice."""
    yield
    twins = sorted(set(LAYERS) & sys.modules.keys())
    assert not twins, f"imported without `dhelix.`: {twins}"
