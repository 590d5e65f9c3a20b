"""Runs that are killed and resumed go on as if nothing had happened. Hosts that resume read every document once."""

import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dhelix.tests.machine import PATIENCE

TRAIN = ("--layers=2", "--seq=16", "--mesh=dp=2,tp=2", "--cpu_devices=4", "--microbatches=2", "--steps=60",
         f"--data={__file__}")  # fmt: skip


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from dhelix.launch import cli; cli.main()", "train", *TRAIN, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(process: subprocess.Popen[str]) -> dict[int, float]:
    out, said = process.communicate(timeout=PATIENCE)
    assert not process.returncode, said
    return {step["number"]: step["loss"] for step in json.loads(out)["steps"]}


def after_first_step(process: subprocess.Popen[str]) -> None:
    """Waits until a process has taken a step. It prints progress on stdout."""
    assert process.stdout is not None
    assert any(line.startswith("step ") for line in process.stdout)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_has_the_same_losses(tmp_path: Path) -> None:
    whole = losses(started("--json"))
    saved = f"--checkpoint_dir={tmp_path / 'run'}", "--save_every=1"
    delays, resumes = random.Random(0), []
    for _ in range(3):
        process = started(*saved, *resumes)
        after_first_step(process)
        try:
            process.wait(delays.uniform(0.3, 1.5))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        steps = [path.name for path in (tmp_path / "run").iterdir() if path.name.isdecimal()]
        resumes = ["--resume"] if steps else []
    rest = losses(started("--json", *saved, *resumes, "--steps=60"))
    assert rest == {number: whole[number] for number in rest} and max(rest) == 60


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends(number: int, tmp_path: Path) -> None:
    process = started(f"--checkpoint_dir={tmp_path / 'run'}", "--steps=100000")
    after_first_step(process)
    os.kill(process.pid, number)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    (step,) = re.findall(r"Interrupted after step (\d+); --resume continues from step (\d+)", out)
    assert step[0] == step[1] and (tmp_path / "run" / step[0]).is_dir()


HOST = """
import json, sys
import jax
processes, number, first, count, batch, port, file = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4 // int(processes))
if int(processes) > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(number))
from itertools import islice
from dhelix.launch.train.data import sources
from dhelix.launch.train.data.batches import Batches
from dhelix.launch.train.data.rows import Rows
from dhelix.models import make_mesh
from jax.sharding import NamedSharding, PartitionSpec
rows = Rows(sources.load(file), 16, True, 256)
batches = Batches(rows, int(batch), NamedSharding(make_mesh(4, 1), PartitionSpec("dp")), 0)
tokens = [arrays["tokens"] for arrays in islice(batches.after(int(first)), int(count))]
shards = [shard.data for array in tokens for shard in array.addressable_shards]
print(json.dumps([bytes(bytearray(int(t) for t in row)).decode() for shard in shards for row in shard]))
"""


def read_by(processes: int, *what: Any) -> list[str]:
    """The rows that processes read, each those of its own devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    *numbers, file = what
    all_of_them = [
        subprocess.Popen([sys.executable, "-c", HOST, *map(str, (processes, n, *numbers, port, file))],
                         stdout=subprocess.PIPE, text=True)
        for n in range(processes)
    ]  # fmt: skip
    outs = [process.communicate(timeout=PATIENCE)[0].splitlines() for process in all_of_them]
    return list(itertools.chain(*(json.loads(out[-1]) for out in outs)))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_that_resume_read_each_document_once_in_an_epoch(processes: int, tmp_path: Path) -> None:
    file = tmp_path / "documents.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"<{n:04d}>" + "x" * 9}) for n in range(64)))
    seen = read_by(1, 0, 2, 8, file) + read_by(processes, 16, 12, 4, file)
    assert sorted(re.findall(r"<(\d{4})>", " ".join(seen))) == [f"{n:04d}" for n in range(64)]
