"""Two processes of a job: each relevant difference between them stops both; without one, both go on.

One pair of processes tries everything that does not end it, one case after the other. Cases that end processes have
their own pairs.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from dhelix.tests.machine import slowness
from dhelix.tests.runtime import job
from dhelix.tests.runtime.processes.disagreements import TABLE

HOST = socket.gethostname()
NAMES = [f"process {number} ({HOST})" for number in (0, 1)]
SECONDS = 10.0  # all processes stop within this time after the last one has come

PROGRAM = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock
import jax
process, port = int(sys.argv[1]), sys.argv[2]
from dhelix.errors import DhelixError
from dhelix.runtime.processes import agreement
from dhelix.tests.runtime.processes import disagreements, job_steps
from dhelix.tests.runtime.processes.job_steps import decorated
job_steps.join(process, port)
given = job_steps.arguments()
found = {"table": disagreements.try_all(process, given)}

def fails_in_1():
    if process == 1:
        raise ValueError(f"no room in {process}")

try:
    found["together"] = agreement.together("make it", fails_in_1, (ValueError,))
except DhelixError as error:
    found["together"] = str(error)
found["largest"] = agreement.largest("compare numbers", process << 40)
words = agreement.gathered("compare words", "größer " * 100_000 if process else "")
found["gathered"] = words == ["", "größer " * 100_000]

def losses(step, rows=16):
    w, batch = job_steps.arguments(rows)
    losses = []
    for _ in range(2):
        w, loss, _ = step(w, batch)
        losses.append(float(loss))
    return losses

def does_not(*_, **__):
    raise jax.errors.JaxRuntimeError("INTERNAL: no such kernel")

step = decorated()
if process == 0:  # asks what nobody else asks
    step.lower(*given), step.preview(*given)
    assert step.report(*given).collective_fingerprint
found["agreeing"] = losses(step)
found["another program of the step"] = losses(step, 32)
found["left alone by all"] = losses(decorated(passes=[]))
os.environ["XLA_FLAGS"] += f" --xla_dump_to=/nowhere/{process}"
found["what may differ"] = losses(decorated(last=lambda x: x + process, dump_to=None if process else sys.argv[3]))
with mock.patch.object(jax.stages.Lowered, "compile", does_not if process else jax.stages.Lowered.compile):
    found["does not compile in one"] = losses(decorated())
os.environ["DHELIX"] = "off"
found["all off"] = losses(decorated())
del os.environ["DHELIX"]
both = decorated()
if process == 0:  # alone, on a device of its own
    import numpy as np
    w, batch = job_steps.arguments()
    own = [np.asarray(x.addressable_data(0)) for x in (w, batch["x"], batch["y"])]
    found["alone"] = float(both(own[0], {"x": own[1], "y": own[2]})[1])
found["together after one alone"] = losses(both)
threads = decorated()
with ThreadPoolExecutor(3) as pool:
    assert len(set(pool.map(lambda _: threads.report(*given).fingerprint, range(3)))) == 1
found["after threads"] = losses(threads)
rows = []
with job_steps.told(rows):
    step(*job_steps.arguments(rows=8 + 16 * process))
found["table"].append(rows[0])
found["after all"] = losses(step)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    outputs = job.outputs(PROGRAM, tmp_path_factory.mktemp("dump"))
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("number", range(len(TABLE)), ids=list(TABLE))
def test_a_disagreement_stops_both(found: list[dict[str, Any]], number: int) -> None:
    (first, *times), (second, *other_times) = (process["table"][number] for process in found)
    row = list(TABLE.values())[number]
    assert max(times[1], other_times[1]) - max(times[0], other_times[0]) < SECONDS * slowness()
    expected = row.message.format(*NAMES)
    if not expected.startswith("process"):
        expected = f"hosts disagree on {expected}"
    assert first.startswith(f"HostsDisagreeError: {expected}")
    assert first.count("disagree") + first.count("stopped before") == 1 and "\n" not in first
    if row.own:
        assert second.partition(": ")[0] != "HostsDisagreeError" and second in first
    else:
        assert second == first


def test_what_both_refuse_is_no_disagreement(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["table"][-3][0] == "PassRefusal: pass refuses: this process has no room"


def test_another_order_of_collectives_stops_both(found: list[dict[str, Any]]) -> None:
    (first, *times), (second, *other_times) = (process["table"][-2] for process in found)
    assert first == second and first.startswith("HostsDisagreeError: hosts disagree on the order of collectives: ")
    assert "about to run the compiled step 'step'" in first
    assert max(times[1], other_times[1]) - max(times[0], other_times[0]) < 2 * SECONDS  # both compile first


def test_other_shapes_stop_both(found: list[dict[str, Any]]) -> None:
    rows = [f"float32[{count},8], float32[{count},8] in {name}" for count, name in zip((8, 24), NAMES, strict=True)]
    assert [process["table"][-1][0] for process in found] == [
        f"HostsDisagreeError: hosts disagree on arguments [1]: {'; '.join(rows)}. They are about to compile another"
        " program of step 'step', for example for arguments of other shapes and would deadlock. Give the"
        " step arguments of the same shapes on every host, also for the last batch"
    ] * 2


def test_those_that_agree_run(found: list[dict[str, Any]]) -> None:
    others = ("table", "alone", "together", "largest", "gathered")
    first, second = ({k: v for k, v in process.items() if k not in others} for process in found)
    assert first == second
    expected = first.pop("agreeing")
    assert expected[0] == pytest.approx(1.15, abs=0.05) and expected[1] < expected[0]
    assert first.pop("another program of the step")[0] != expected[0]
    for name, losses in first.items():
        assert losses == pytest.approx(expected, rel=1e-5), name


def test_what_processes_tell_each_other(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["together"] == "no room in 1"
        assert process["largest"] == 1 << 40
        assert process["gathered"]


def test_a_step_of_one_process_waits_for_nobody(found: list[dict[str, Any]]) -> None:
    assert found[0]["alone"] > 0
