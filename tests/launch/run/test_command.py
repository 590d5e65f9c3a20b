"""`dhelix run`: the program is a process of its own, with its own arguments, exit code, traceback and children."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from dhelix.launch import cli
from dhelix.launch.run import command
from dhelix.launch.run import flags as run_flags
from dhelix.runtime.undecorated import policy
from dhelix.runtime.undecorated.policy import Policy
from dhelix.tests.machine import PATIENCE

SCRIPT = """
import multiprocessing, os, subprocess, sys
print("arguments", sys.argv[1:], __name__)
jax_is_there = "jax" in sys.modules
print("jax imported", jax_is_there)

def child(n):
    import jax
    from jax._src.interpreters import pxla
    print("child looks", pxla.MeshComputation.compile.__name__, flush=True)

if __name__ == "__main__":
    if "--spawn" in sys.argv:
        process = multiprocessing.get_context("spawn").Process(target=child, args=(1,))
        process.start(); process.join()
    if "--fail" in sys.argv:
        raise ValueError("the user's own error")
    sys.exit(7 if "--exit" in sys.argv else 0)
"""


def values() -> flags.FlagValues:
    made = flags.FlagValues()
    run_flags.define_flags(made)
    return made


def policy_of(*arguments: str) -> Policy:
    parsed = values()
    parsed(["dhelix", *arguments])
    return command.policy_of(parsed.flag_values_dict())


def dhelix_run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "dhelix", "run", *arguments]
    return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


def test_arguments_and_exit_code_are_the_programs_own(tmp_path: Path) -> None:
    done = dhelix_run(tmp_path, "--skew", "1", "--quiet", "script.py", "--exit", "--schedule", "list", "-m", "x")
    assert done.returncode == 7 and done.stderr == ""
    said = done.stdout.splitlines()
    assert said == ["arguments ['--exit', '--schedule', 'list', '-m', 'x'] __main__", "jax imported False"]


@pytest.mark.parametrize("module", ["dhelix.passes.jax_compat", "dhelix.auto", "jax"])
def test_whatever_imports_jax_first_programs_are_looked_at(tmp_path: Path, module: str) -> None:
    script = f"""
import {module}, colorsys
from jax._src.interpreters import pxla
print("caught", hasattr(pxla.MeshComputation.compile, "__wrapped__"))
"""
    (tmp_path / "script.py").write_text(script)
    words = [sys.executable, "-m", "dhelix", "run", "script.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("caught True\n", "dhelix run: the program compiled nothing\n")


def test_a_program_on_one_device_gets_a_report_and_its_helpers_do_not(tmp_path: Path) -> None:
    script = """
import subprocess, sys, jax
jax.jit(lambda x: x + 1)(1.0)
if not sys.argv[1:]:
    subprocess.run([sys.executable, sys.argv[0], "helper"], check=True)
"""
    (tmp_path / "script.py").write_text(script)
    words = [sys.executable, "-m", "dhelix", "run", "--report", "r.json", "script.py"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("0 of") == 1 and "on one device, or without gradients" in done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["programs"] == []


def test_a_traceback_is_the_programs_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    plain = subprocess.run([sys.executable, "script.py", "--fail"], cwd=tmp_path, capture_output=True, text=True)
    done = dhelix_run(tmp_path, "script.py", "--fail")
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr) and "the user's own" in done.stderr


def test_children_look_at_their_programs_too(tmp_path: Path) -> None:
    done = dhelix_run(tmp_path, "-m", "script", "--spawn")
    assert done.returncode == 0 and "child looks compile" in done.stdout


@pytest.mark.slow
def test_a_program_trains_the_same_and_the_report_says_what_changed(tmp_path: Path) -> None:
    code = "from dhelix.tests.runtime.undecorated import trainers; print(trainers.ahead_of_time())"
    (tmp_path / "train.py").write_text(code)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    words = [sys.executable, "train.py"], [sys.executable, "-m", "dhelix", "run", "--report", "r.json", "train.py"]
    plain, done = (
        subprocess.run(one, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True) for one in words
    )
    assert done.stdout == plain.stdout
    assert "1 of" in done.stderr and "jit_train_step: two strands over 3 layers, 4 micro-batches" in done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert [one["name"] for one in report["programs"] if one["outcome"] == "interleaved"] == ["jit_train_step"]


JOB = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[1]))
mesh = Mesh(np.array(jax.devices()), ("dp",))

def array(shape, spec, seed):
    values = np.asarray(np.random.default_rng(seed).normal(size=shape) * 0.1, np.float32)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: values[index])

def loss_fn(w, x):
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)
    return jnp.mean((h - 1) ** 2)

@jax.jit
def train_step(w, batch):
    def one(carry, x):
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss_fn)(w, x)), None
    (loss, grads), _ = jax.lax.scan(one, (0.0, jnp.zeros_like(w)), batch)
    return w - 0.1 * grads, loss

w = array((3, 16, 16), P(), 0)
for step in range(3):
    w, loss = train_step(w, array((4, 16, 16), P(None, "dp"), step))
    print("loss", float(loss))
"""


@pytest.mark.slow
def test_all_processes_of_a_job_interleave_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}

    def losses(*before: str) -> tuple[list[str], str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        processes = [
            subprocess.Popen(
                [sys.executable, *before, "job.py", str(n), address],
                cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for n in range(2)
        ]  # fmt: skip
        said = [process.communicate(timeout=PATIENCE) for process in processes]
        lines = [[line for line in out.splitlines() if line.startswith("loss")] for out, _ in said]
        assert lines[0] == lines[1] and len(lines[0]) == 3, said
        return lines[0], said[0][1]

    plain, _ = losses()
    found, report = losses("-m", "dhelix", "run")
    assert found == plain and "jit_train_step: two strands over 3 layers, 4 micro-batches" in report


@pytest.mark.parametrize(
    ("arguments", "own", "program"),
    [
        (["a.py", "--layers", "4"], [], ["a.py", "--layers", "4"]),
        (["--skew", "1", "a.py"], ["--skew", "1"], ["a.py"]),
        (["--skew=1", "--quiet", "a.py"], ["--skew=1", "--quiet"], ["a.py"]),
        (["--noquiet", "-m", "pkg.train", "--x"], ["--noquiet"], ["-m", "pkg.train", "--x"]),
        (["--memory-limit", "4GiB", "--", "-odd.py"], ["--memory-limit", "4GiB"], ["-odd.py"]),
        (["--env"], ["--env"], []),
    ],
)
def test_what_follows_the_program_is_its_own(arguments: list[str], own: list[str], program: list[str]) -> None:
    assert run_flags.split(values(), arguments) == (own, program)


def test_flags_and_a_file_make_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text('only = ["train_*"]\n[options]\nschedule = "list"\n[functions.train_step]\nskew = 1\n')
    found = policy_of("--options", str(path), "--memory_limit=4GiB", "--skip", "train_eval", "--report", "r.json")
    assert found.only == ("train_*",) and found.skip == ("train_eval",) and found.report == str(Path.cwd() / "r.json")
    assert found.of("jit_train_step") == {"schedule": "list", "memory_limit": "4GiB", "skew": 1}
    assert found.allows("jit_train_step") and not found.allows("jit_train_eval") and not found.allows("jit_step")
    assert policy.loads(found.dumps()) == found
    assert policy.loads("1") == Policy()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a program: a script"),
        (["-m"], "-m needs the name of a module"),
        (["--plan", "none.json", "a.py"], "none.json: cannot be read"),
        (["--options", "none.toml", "a.py"], "none.toml: cannot be read"),
        (["--schedule=fast", "a.py"], "schedule"),
        (["--env", "a.py"], "--env runs nothing"),
        (["--microbatches", "4", "a.py"], "microbatches"),
    ],
)
def test_wrong_arguments_are_one_clear_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("ran"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", *arguments])
    assert stopped.value.code in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and line.startswith("dhelix run: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("only = 1", "only is a list of names"),
        ("[options]\nmicrobatches = 4", "'microbatches' is no option for undecorated steps"),
        ("[functions.step]\nverify = true", "'verify' of 'step' is no option"),
        ("fast = true", "'fast' is unknown; it may have functions, only, options, skip"),
        ("only = [", "no TOML file"),
        ("functions = {step = 1}", "options of 'step' are a table"),
    ],
)
def test_a_wrong_file_is_one_clear_error(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(text)
    with pytest.raises(Exception, match=said):
        policy_of("--options", str(path))


def test_the_environment_can_be_printed_for_launchers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", "--schedule=list", "--env"])
    assert not stopped.value.code
    auto, path = capsys.readouterr().out.splitlines()
    assert auto.startswith(f"export {policy.VARIABLE}=") and '"schedule": "list"' in auto
    assert path.endswith(f"/launch/run/site{os.pathsep}/mine")


def test_a_policy_that_is_none_stops_nothing(tmp_path: Path) -> None:
    """Another program may set the variable. The user's program runs, and one line says what is wrong."""
    (tmp_path / "script.py").write_text("import jax; print('trains')")
    environment: dict[str, Any] = {**os.environ, **command.environment(Policy(), os.environ), policy.VARIABLE: "{"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "trains\n"
    (line,) = done.stderr.splitlines()
    assert "dhelix run: DHELIX_AUTO holds no policy" in line
