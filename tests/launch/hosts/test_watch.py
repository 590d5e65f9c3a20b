"""Local processes without JAX: exit codes, output, and who is named when one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dhelix.tests.machine import PATIENCE, slowness

PROGRAM = """
import json, os, signal, sys, time
number = json.loads(os.environ["DHELIX_LAUNCH"])["process"]
print("out", number, sys.argv[1:], sys.stdin.read() if number == 0 else "", flush=True)
print("err", number, file=sys.stderr)
what, who = sys.argv[1], int(sys.argv[2])
if who in (number, -1):
    if what == "exit": sys.exit(3)
    if what == "raise": raise ValueError("the program's own")
    if what == "kill": time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)
if what != "end": time.sleep(60)
"""


def launch(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "dhelix", "launch", *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path)}
    return subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        input="typed",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_process_0_is_shown_as_it_is_and_no_folder_stays(tmp_path: Path) -> None:
    done = launch(tmp_path, "--processes", "2", "program.py", "end", "9", "--flag")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out 0 ['end', '9', '--flag'] typed\n", "err 0\n")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_the_others_are_in_files_or_shown_with_their_numbers(tmp_path: Path) -> None:
    launch(tmp_path, "--processes", "2", "--logs", "logs", "program.py", "end", "9")
    assert (tmp_path / "logs" / "process-1.log").read_text() == "out 1 ['end', '9'] \nerr 1\n"
    done = launch(tmp_path, "--processes", "2", "--log", "all", "program.py", "end", "9")
    assert sorted(done.stdout.splitlines()) == ["[0] out 0 ['end', '9'] typed", "[1] out 1 ['end', '9'] "]
    assert sorted(done.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_a_job_whose_output_nobody_reads_goes_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nfor n in range(30): time.sleep(0.05); print(n)\n")
    words = f"{sys.executable} -m dhelix launch --processes 2 --log all program.py | head -1; exit ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_killed_process_is_named_and_the_others_end(tmp_path: Path) -> None:
    start = time.monotonic()
    done = launch(tmp_path, "--processes", "3", "--logs", "logs", "program.py", "kill", "2")
    assert done.returncode == 128 + signal.SIGKILL and time.monotonic() - start < 40 * slowness()
    assert "dhelix launch: process 2 (pid" in done.stderr and "was ended by SIGKILL" in done.stderr
    assert "the 2 other processes were stopped" in done.stderr
    assert "the end of logs/process-2.log:\n  out 2 ['kill', '2']" in done.stderr


@pytest.mark.parametrize("who", ["0", "-1"], ids=["process 0", "all"])
def test_a_program_that_fails_where_one_sees_it_says_so_alone(tmp_path: Path, who: str) -> None:
    done = launch(tmp_path, "--processes", "2", "program.py", "raise", who)
    assert done.returncode == 1 and "dhelix" not in done.stderr
    assert done.stderr.startswith('err 0\nTraceback (most recent call last):\n  File "')
    assert "sitecustomize" not in done.stderr
    assert done.stderr.endswith("ValueError: the program's own\n")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]  # no folder that nobody knows of


def test_a_program_that_fails_out_of_sight_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path, "--processes", "2", "program.py", "exit", "1")
    assert done.returncode == 3
    assert "process 1 (pid" in done.stderr and "ended with exit status 3; the other was stopped" in done.stderr
    (folder,) = tmp_path.glob("dhelix-launch-*")
    assert f"the end of {folder}/process-1.log" in done.stderr


def test_after_a_kill_of_process_0_one_knows_where_the_others_wrote(tmp_path: Path) -> None:
    done = launch(tmp_path, "--processes", "2", "program.py", "kill", "0")
    (folder,) = tmp_path.glob("dhelix-launch-*")
    assert f"dhelix launch: the output of the other processes is in {folder}\n" in done.stderr


@pytest.mark.parametrize("ignored", [False, True], ids=["a terminal", "nohup"])
def test_a_second_signal_kills_unless_it_is_ignored(tmp_path: Path, ignored: bool) -> None:
    (tmp_path / "program.py").write_text(
        "import glob, os, signal, time\n"
        "if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN: signal.signal(signal.SIGHUP, lambda *_: None)\n"
        "open(f'ready-{os.getpid()}', 'w').close()\nwhile len(glob.glob('ready-*')) < 2: time.sleep(0.1)\n"
        "print(flush=True)\nfor _ in range(40): time.sleep(0.1)\n"
    )
    words = ["nohup"] * ignored + [sys.executable, "-m", "dhelix", "launch", "--processes", "2", "program.py"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        for _ in range(2):
            launcher.send_signal(signal.SIGHUP)
            time.sleep(0.5)
        _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == (0 if ignored else 128 + signal.SIGKILL)
    assert ("the output of the other processes is in" in said) != ignored
    assert bool(list(tmp_path.glob("dhelix-launch-*"))) != ignored


def test_a_job_that_not_all_processes_join_says_so(tmp_path: Path) -> None:
    said_by_jax = "absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /xla.coordination.X/RegisterTask\n"
    (tmp_path / "ends.py").write_text(f"import os, sys\nsys.stderr.write({said_by_jax!r})\nos.abort()\n")
    done = launch(tmp_path, "--coordinator", "a:1", "--num_processes", "3", "--process_id", "1", "ends.py")
    assert done.returncode == 128 + signal.SIGABRT
    assert "dhelix launch: not all 3 processes joined the job in time: one was not started" in done.stderr
    assert "; process 1 of 3 was ended by SIGABRT because of it\n" in done.stderr


def test_what_a_killed_process_started_ends_and_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        "import os, sys, time\nfrom dhelix.runtime.launched import task\n"
        "open('child', 'w').write(f'{os.getpid()} {task.mine()}\\n')\ntime.sleep(60)\n"
    )
    (tmp_path / "starts.py").write_text(
        "import os, signal, sys, time\nos.system(f'{sys.executable} child.py &')\n"  # the shell ends at once
        "while not os.path.exists('child') or not open('child').read().endswith('\\n'): time.sleep(0.1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert launch(tmp_path, "--processes", "1", "starts.py").returncode == 128 + signal.SIGKILL
    number, task = (tmp_path / "child").read_text().split()
    assert task == "None" and not Path(f"/proc/{number}").exists()


def test_a_killed_launcher_takes_its_processes_with_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "dhelix", "launch", "--processes", "1", "program.py"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        launcher.kill()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} still runs")


@pytest.mark.parametrize(
    "words, said",
    [
        (("--processes", "2"), "give a program"),
        (("--processes", "2", "--coordinator", "a:1", "program.py"), "leave out --coordinator"),
        (("--processes", "2", "--mesh", "dp", "program.py"), "--mesh dp"),
        (("--coordinator", "a:1", "program.py"), "JAX_NUM_PROCESSES is not set"),
        (("--processes", "2", "--logs", "program.py/x", "program.py"), "--logs program.py/x"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = launch(tmp_path, *words)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1
