"""The benchmark of other people's trainers, without these trainers: their commands, their losses, and the table."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dhelix.benchmarks.trainers import on_gpus
from dhelix.benchmarks.trainers.cases import CASES, HERE, Case
from dhelix.benchmarks.trainers.results import Program, Result, Run, table

PLAIN = Run((6.0, 5.5), 10.0, 4.0, 12.0)
CHANGED = Program("jit_step", "interleaved", ("jit_step: two strands over 2 layers, 4 micro-batches",), 5.0)
EQUAL = Result(
    "maxtext", "FSDP 8", {"maxtext": "0.2.5", "jax": "0.11.2"}, PLAIN, replace(PLAIN, first=20.0), (CHANGED,)
)


def case(name: str) -> Case:
    return next(one for one in CASES if one.name == name)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_each_trainer_has_pinned_versions_and_a_command(one: Case, tmp_path: Path) -> None:
    pins = (HERE / f"{one.environment}.txt").read_text().splitlines()
    assert "jax==0.11.2" in pins and all("==" in line for line in pins if not line.startswith("#"))
    if one.trainer:
        assert any(line.replace("_", "-").startswith(f"{one.trainer}==") for line in pins)
    words = one.arguments(tmp_path)
    assert words[0] == "-m" or Path(words[0]).exists()


def test_losses_of_maxtext_come_from_its_file_and_agree_with_what_it_prints(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"learning/loss": 6.0223073}\n{"learning/loss": 6.0206260}\n')
    printed = "completed step: {}, seconds: 1.9, loss: {}, lm_loss: 6.022, perplexity: 412.529\n"
    text = printed.format(0, "6.022") + printed.format(1, "6.021")
    assert case("maxtext").losses(tmp_path, text) == (6.0223073, 6.0206260)
    with pytest.raises(ValueError, match="printed"):
        case("maxtext").losses(tmp_path, text.replace("6.021", "6.029"))


def test_losses_of_levanter_count_once_for_each_step(tmp_path: Path) -> None:
    rows = [
        {"tracker": "json_logger", "event": "log", "step": step, "metrics": {"train/loss": loss, "global_step": step}}
        for step, loss in ((0, 5.5), (1, 5.25), (1, 5.25))
    ]
    text = "".join(f"I levanter.json_logger {json.dumps(row)}\n" for row in rows)
    assert case("levanter-gpt2").losses(tmp_path, text) == (5.5, 5.25)


def test_the_table_says_whether_losses_are_equal() -> None:
    assert "| equal in all digits | jit_step: two strands over 2 layers, 4 micro-batches | 10 -> 20 |" in table([EQUAL])
    other = replace(PLAIN, losses=(6.0, 5.6))
    different = replace(EQUAL, dhelix=other, exact=(PLAIN, PLAIN))
    assert "differ by up to 0.02; equal in all digits without the passes that round" in table([different])
    assert "different, too, without" in table([replace(different, exact=(PLAIN, other))])


def test_results_survive_a_file() -> None:
    whole = replace(EQUAL, exact=(PLAIN, PLAIN))
    assert Result.of(json.loads(json.dumps(asdict(whole)))) == whole


def test_the_list_of_cases_is_printed() -> None:
    command = [sys.executable, str(HERE / "run.py"), "--list"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [one.name for one in CASES]


def test_runs_on_gpus_compare_with_the_best_plain_run_of_their_link() -> None:
    every = list(on_gpus.runs(("nvlink", "no-p2p")))
    assert {(run.link, run.by) for run in every} == {(link, by) for link in on_gpus.LINKS for by in ("plain", "dhelix")}
    for run, middle in zip(every[-3:], (90.0, 120.0, 99.0), strict=True):
        run.steps_ms, run.losses = [middle - 1, middle, middle + 1], [6.0]
    every[0].failed = "exit status 1: no GPU"
    on = {"gpus": "2 x NVIDIA H200", "date": "2026-11-28", "jax": "0.11.2"}
    shape = {"gpus": 2, "layers": 4, "seq": 4096, "batch": 4}
    text = on_gpus.markdown({"on": on, **shape, "runs": [asdict(run) for run in (every[0], *every[-3:])]})
    assert "| 90.0 (89.0-91.0) | 1.100 |" in text and "no GPU" in text
