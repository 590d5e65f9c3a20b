"""Job files: what Slurm, Kubernetes and Docker read in them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from typing import Any

import pytest

from dhelix.launch import cli

yaml = pytest.importorskip("yaml")

PROGRAM = ("train.py", "--name", "a b", "--cost", "$5 'x'")


def template(capsys: pytest.CaptureFixture[str], kind: str, *words: str) -> str:
    with pytest.raises(SystemExit) as done:
        cli.main(["launch", "--template", kind, *words])
    assert not done.value.code, capsys.readouterr().err
    return capsys.readouterr().out


def expanded(words: list[str]) -> list[str]:
    """What Kubernetes makes of a command, where no name in $(NAME) is known."""
    return [word.replace("$$", "$") for word in words]


@pytest.mark.parametrize("kind", ["slurm", "jobset", "dockerfile"])
def test_flags_of_launch_are_in_the_job(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    text = template(capsys, kind, "--mesh", "dp=2,tp=8", "--nocheck", "--heartbeat=20", "--log", "all", "train.py")
    words = re.sub(r'[",]+', "", text.replace("dp=2,tp=8", "dp=2;tp=8"))
    assert "dhelix launch --heartbeat 20 --nocheck --log all --mesh dp=2;tp=8" in words


def test_kubernetes_expands_no_variable_in_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(template(capsys, "jobset", "train.py", "$(HOSTNAME)", "😀"))
    command = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["$$(HOSTNAME)", "😀"]  # $$( is how Kubernetes writes $( itself


def test_slurm_reads_the_directives_and_bash_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    text = template(capsys, "slurm", "--nodes", "4", "--gpus_per_node=2", "--time", "2-00", *PROGRAM)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    first, *lines = text.splitlines()
    assert first == "#!/bin/bash"
    end = next(n for n, line in enumerate(lines) if not line.startswith("#"))  # sbatch stops reading there
    assert not [line for line in lines[end:] if line.startswith("#SBATCH")]
    directives = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line) for line in lines[:end]]
    given = {one[1]: one[2] for one in directives if one is not None}
    assert None not in directives
    assert given["nodes"] == "4" and given["gpus-per-node"] == "2" and given["time"] == "2-00"
    assert given.keys() <= {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "time", "output"}
    words = shlex.split(text.partition("\nsrun")[2].replace("\\\n", " "))
    assert words[words.index("train.py") :] == list(PROGRAM) and words[2:4] == ["dhelix", "launch"]


def test_a_jobset_has_the_fields_of_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(
        template(capsys, "jobset", "--nodes", "4", "--name", "my-job", "--image", "r.io/a:1", *PROGRAM)
    )
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    (replicated,) = job["spec"]["replicatedJobs"]
    spec: dict[str, Any] = replicated["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["template"]["spec"]["restartPolicy"] in ("Never", "OnFailure")
    assert container["image"] == "r.io/a:1" and expanded(container["command"][-len(PROGRAM) :]) == list(PROGRAM)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert all(value is None or isinstance(value, str) for value in variables.values())  # Kubernetes takes no numbers
    assert variables["JAX_NUM_PROCESSES"] == "4"
    host, port = variables["JAX_COORDINATOR_ADDRESS"].split(":")
    # <JobSet>-<replicated job>-<its number>-<pod's number>.<subdomain>, and the JobSet's name is the subdomain
    assert host == f"my-job-{replicated['name']}-0-0.my-job" and job["spec"]["network"]["enableDNSHostnames"]
    assert int(port) in [one["containerPort"] for one in container["ports"]]
    volumes = {one["name"] for one in spec["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes


def test_a_dockerfile_has_instructions_alone(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in template(capsys, "dockerfile", *PROGRAM).splitlines() if line and line[0] != "#"]
    words = [(name, rest) for line in lines for name, _, rest in [line.partition(" ")]]
    assert {name for name, _ in words} == {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert words[0][0] == "FROM" and not words[0][1].endswith(":latest")
    assert json.loads(dict(words)["CMD"]) == list(PROGRAM)


@pytest.mark.parametrize(
    "words, said",
    [
        (("slurm", "--time", "soon"), "--time 'soon'"),
        (("jobset", "--name", "My_Job"), "--name 'My_Job'"),
        (("jobset", "--image", "a b"), "--image 'a b'"),
        (("slurm", "--processes", "2"), "leave out --processes"),
        (("slurm", "--mesh", "dp"), "--mesh dp"),
        (("slurm", "-m"), "give a program"),
    ],
)
def test_a_value_that_no_scheduler_takes_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["launch", "--template", *words])
    assert done.value.code == 1 and said in capsys.readouterr().err
