"""If one of two processes ends, is killed or does not come, the other one is told which, and ends as well."""

from __future__ import annotations

import json
import re
import socket
import time

from dhelix.tests.machine import slowness
from dhelix.tests.runtime import job

HOST = socket.gethostname()
SECONDS = 10.0

ERROR = """
import sys, time
from dhelix.tests.runtime.processes import job_steps
process, port = int(sys.argv[1]), sys.argv[2]
job_steps.join(process, port)
given = job_steps.arguments()
step = job_steps.decorated()
if process == 1:
    print(time.time())
    raise RuntimeError("no data here")
step(*given)
"""


def test_an_error_before_the_step_ends_both() -> None:
    waiting, failed = job.run(ERROR)
    ended = time.time()
    assert (waiting.status, failed.status) == (1, 1)
    assert ended - float(failed.output.split()[-1]) < SECONDS * slowness()
    told = [line for line in waiting.errors.splitlines() if line.startswith("dhelix.errors.")]
    error = "it ended with RuntimeError: no data here"
    assert told == [
        f"dhelix.errors.HostsDisagreeError: process 1 ({HOST}) stopped before all processes ran the step: {error}"
    ]
    assert failed.errors.splitlines()[-1] == "RuntimeError: no data here"


NEVER = """
import json, os, signal, sys, time
process, port = int(sys.argv[1]), sys.argv[2]
from dhelix.runtime.processes import agreement, rendezvous
from dhelix.tests.runtime.processes import job_steps
rendezvous._FIRST_REPORT = 0.5
job_steps.join(process, port)
given = job_steps.arguments()
found = []
if process == 0:
    for name in ("of which one is late", "of which one is killed"):
        with job_steps.told(found):
            job_steps.decorated(name)(*given)
    print(json.dumps(found), flush=True)
    os._exit(0)  # JAX would wait for the other one to leave, too
time.sleep(3)
with job_steps.told(found):
    job_steps.decorated("of which one is late")(*given)
print(json.dumps(found), flush=True)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_does_not_come_is_named() -> None:
    first, second = job.run(NEVER, environments=[{"DHELIX_AGREEMENT_TIMEOUT": "2"}] * 2)
    assert (first.status, second.status) == (0, -9)
    (late, *_), (killed, came, knew) = json.loads(first.output)
    late_message = (
        "HostsDisagreeError: process 1 did not come to run step 'of which one is late' within 2 s. All processes"
    )
    assert re.sub(r" \(.*?\)", "", late).startswith(late_message)
    assert "process 1" in killed and "'of which one is killed' within 2 s" in killed
    assert knew - came < SECONDS * slowness()
    ((told, came, knew),) = json.loads(second.output)
    assert told == late and knew - came < SECONDS * slowness(), "who comes too late is told so at once"
    waits = [line for line in first.errors.splitlines() if "waiting for process 1" in line]
    assert waits and "to run step 'of which one is late', for 1 s so far and 2 s at most" in waits[0]
