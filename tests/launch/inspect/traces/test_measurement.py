"""Measured times of a made-up job, against the times that it was made with, and against counting microseconds."""

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.launch.inspect.answers.critical_path import PAUSE
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.inspect.traces import picture
from dhelix.launch.inspect.traces.measurement import Measurement, _often, measure
from dhelix.launch.inspect.traces.tables import tables
from dhelix.runtime.profiling.traces import recording
from dhelix.tests.launch.inspect.traces import simulated_job
from dhelix.tests.runtime.profiling import recorded_traces
from dhelix.tests.runtime.profiling.recorded_traces import kernel


def measured(folder: Path, *late: float, **how: object) -> Measurement:
    return measure(recording.load(simulated_job.record(folder, late, **how)))  # type: ignore[arg-type]


def counted(late: tuple[float, ...], gpu: int, steps: int = 4) -> dict[str, float]:
    """Milliseconds of a step in which the GPU computes, communicates, does both or nothing, counted one by one."""
    found = simulated_job.kernels(late, steps)[gpu]
    begin, end = min(k[1] for k in found), max(k[2] for k in found)
    busy = {kind: np.zeros(round(end - begin), bool) for kind in ("dot", "all")}
    for _, start, stop, name, _ in found:
        assert name is not None
        busy[name[:3]][round(start - begin) : round(stop - begin)] = True
    compute, communication = busy["dot"], busy["all"]
    counts = {
        "step_ms": compute.size,
        "compute_ms": compute.sum(),
        "communication_ms": communication.sum(),
        "hidden_ms": (compute & communication).sum(),
        "exposed_ms": (communication & ~compute).sum(),
        "idle_ms": (~compute & ~communication).sum(),
    }
    return {name: count / 1e3 / steps for name, count in counts.items()}


@pytest.mark.parametrize("late", [(0.0, 0.0), (0.0, 250.0), (700.0, 0.0, 100.0, 350.0)])
def test_times_of_each_gpu_equal_counting(tmp_path: Path, late: tuple[float, ...]) -> None:
    found = measured(tmp_path, *late)
    assert found.steps == 4
    for gpu in found.gpus:
        for name, expected in counted(late, gpu.gpu).items():
            assert getattr(gpu, name) == pytest.approx(expected, rel=1e-6), name
        assert gpu.step_ms == pytest.approx(gpu.compute_ms + gpu.exposed_ms + gpu.idle_ms)


def test_what_overlap_costs(tmp_path: Path) -> None:
    """The product beside the all-gather takes 1.0 ms, and the equal one alone takes 0.9."""
    for gpu in measured(tmp_path, 0.0, 0.0).gpus:
        assert gpu.slow_down_ms == pytest.approx(0.1)
        assert gpu.slow_down_known == 1.0


def test_streams(tmp_path: Path) -> None:
    computing, communicating = measured(tmp_path, 0.0, 0.0).gpus[0].streams
    assert (computing.compute_ms, computing.communication_ms) == (pytest.approx(2.9), 0.0)
    assert computing.slow_down_ms == pytest.approx(0.1)
    assert (communicating.hidden_ms, communicating.exposed_ms) == (pytest.approx(0.8), pytest.approx(0.3))


def test_critical_path(tmp_path: Path) -> None:
    """What runs beside the all-gather decides, not the all-gather; late GPUs make the others wait in it."""
    path = measured(tmp_path / "even", 0.0, 0.0).slowest.path
    expected = {PAUSE: 1.8, "dot.1": 1.0, "dot.2": 1.0, "dot.3": 0.9, "all-reduce.1": 0.3}
    assert {one.instruction: one.ms for one in path} == pytest.approx(expected)
    early = measured(tmp_path / "late", 0.0, 250.0).gpus[0].path
    assert {one.instruction: one.ms for one in early}["all-reduce.1"] == pytest.approx(0.55)


def test_a_product_of_two_kernels_is_done_once() -> None:
    """A library may split a product and add up its parts in a second kernel, which has the product's name."""
    dots = [i for i in simulated_job.program(2).entry.instructions if i.opcode == "dot"]
    assert _often({dots[0]: 1.0, dots[1]: 2.0, dots[2]: 1.0}) == {dots[0].computation: 1.0}
    assert _often({dots[0]: 16.0, dots[1]: 32.0}) == {dots[0].computation: 16.0}


def test_who_arrives_last(tmp_path: Path) -> None:
    early, late = measured(tmp_path, 0.0, 250.0).gpus
    assert (early.waited_ms, late.waited_ms) == (pytest.approx(0.5), pytest.approx(0.0))  # at two collectives
    assert (early.delays_ms, late.delays_ms) == (pytest.approx(0.0), pytest.approx(0.5))


def test_bandwidth_does_not_count_waiting(tmp_path: Path) -> None:
    found = {one.kind: one for one in measured(tmp_path, 0.0, 600.0).collectives}
    gather, reduce = found["all-gather"], found["all-reduce"]
    (group,) = gather.groups
    assert group.gpus == (0, 1)
    assert group.transfer_ms == pytest.approx(0.8)
    assert group.skew_ms == pytest.approx(0.6)
    assert group.gb_per_s == pytest.approx(8 * 2**20 / 2 / 0.8e-3 / 1e9)
    assert reduce.groups[0].gb_per_s == pytest.approx(8 * 2**20 / 0.3e-3 / 1e9)
    assert (gather.devices, gather.bytes, gather.executions) == (2, 8 * 2**20, 1)
    assert gather.waited_ms == pytest.approx(0.3)  # the mean of 0.6 and 0
    assert [(under.instruction, under.what) for under in gather.under] == [("dot.2", "GEMM"), ("dot.3", "GEMM")]


def test_two_hosts_whose_clocks_differ(tmp_path: Path) -> None:
    late, ahead = (0.0, 0.0, 0.0, 300.0), 40_000.0
    found = measured(tmp_path, *late, hosts={"node-0": 0.0, "node-1": ahead})
    assert found.hosts == ("node-0", "node-1")
    assert [gpu.host for gpu in found.gpus] == ["node-0", "node-0", "node-1", "node-1"]
    assert found.clock_offsets_ms == {"node-0": 0.0, "node-1": pytest.approx(ahead / 1e3)}
    assert [gpu.waited_ms for gpu in found.gpus] == pytest.approx([0.6, 0.6, 0.6, 0.0], abs=1e-6)
    assert found.gpus[3].delays_ms == pytest.approx(1.8)


def test_pauses(tmp_path: Path) -> None:
    (gpu, _) = measured(tmp_path, 0.0, 0.0).gpus
    (cause,) = gpu.pauses
    assert cause == "between steps"
    assert gpu.pauses[cause].count == 3
    assert gpu.pauses[cause].ms == pytest.approx(gpu.idle_ms)


def test_without_the_program_names_count(tmp_path: Path) -> None:
    found = measured(tmp_path, 0.0, 0.0, whole=False)
    assert found.steps == 0
    assert found.gpus[0].hidden_ms == pytest.approx(4 * counted((0.0, 0.0), 0)["hidden_ms"])
    assert [(one.instruction, one.kind) for one in found.collectives] == [
        ("all-reduce.1", ""),
        ("all-gather-start.1", ""),
    ]
    assert any("does not hold the program jit_step" in note for note in found.notes)


def test_the_json_of_a_trace_says_the_same(tmp_path: Path) -> None:
    file = simulated_job.record_json(tmp_path / "node-0.trace.json.gz", (0.0, 250.0))
    assert recording.is_trace(file)
    found, whole = measure(recording.load(file)), measured(tmp_path / "whole", 0.0, 250.0)
    for one, other in zip(found.gpus, whole.gpus, strict=True):
        assert one.exposed_ms == pytest.approx(4 * other.exposed_ms)
        assert one.waited_ms == pytest.approx(4 * other.waited_ms)


def test_compute_in_cuda_graphs_is_told(tmp_path: Path) -> None:
    nameless = [kernel(1, 0, 500, "command_buffer"), kernel(2, 0, 700, "all-reduce.1"), kernel(1, 500, 900, "dot.1")]
    (file := tmp_path / "node-0.xplane.pb").write_bytes(recorded_traces.serialized({0: nameless}))
    notes = measure(recording.load(file)).notes
    assert any(note.startswith("56% of compute belongs to CUDA graphs") for note in notes)


@pytest.mark.parametrize("seed", range(40))
def test_damage_does_no_harm(seed: int, tmp_path: Path) -> None:
    """A damaged trace is refused or measured."""
    rng = random.Random(seed)
    (file,) = simulated_job.record(tmp_path, (0.0, 250.0)).rglob("*.xplane.pb")
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 3, 10])):
        at = rng.randrange(len(data))
        data[at : at + rng.choice([0, 1, 1, 9, len(data)])] = rng.randbytes(rng.choice([0, 1, 1, 5]))
    file.write_bytes(bytes(data) or b"x")
    with contextlib.suppress(DhelixError):
        found = recording.load(file)
        with dumps.blaming_module("damaged", lambda: found.module.to_bytes() if found.module else b""):
            list(tables([measured := measure(found)], 5))
        picture.of(measured)
