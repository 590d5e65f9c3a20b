"""Every command of the README runs as it stands there, in a folder and a home folder that are empty: those for GPUs on
paper, as far as they get without one."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Commands as the README has them -> what they run with here where that differs, the status, and words that come out.
RUNS: dict[str, tuple[str, int, str]] = {
    "dhelix train --cpu_devices 8 --mesh dp=2,tp=4": ("", 0, "two strands over 4 layers"),
    "dhelix train --cpu_devices 8 --mesh dp=2,tp=4 --plain": ("", 0, "tokens/s"),
    "dhelix train --cpu_devices 8 --pp 2 --mesh dp=2,tp=2": ("", 0, "GPU compiler"),
    "dhelix train --preset llama-8b --layers 8 --microbatches 16 --mesh dp=1,tp=4 --data corpus.txt"
    " --checkpoint_dir run1 --save_every 100": ("", 1, "4 devices"),
    "dhelix train --help": ("", 0, "--distributed"),
    "dhelix profile --preset llama-8b --layers 4 --mesh dp=1,tp=4 --heat_map pairs.png": ("", 0, "Wrote pairs.png."),
    "dhelix inspect DUMP [--compare OTHER] [--png timeline.png] [--perfetto trace.pb] [--json]": (
        "dhelix inspect dump.hlo --compare dump.hlo --png timeline.png --perfetto trace.pb", 0, "1.00 x",
    ),
    "dhelix plan --preset NAME --mesh tp=4 --out plan.json --picture plan.png": (
        "dhelix plan --preset llama-8b --layers 2 --microbatches 4 --mesh tp=4 --settings connections1"
        " --out plan.json --picture plan.png", 0, "wrote plan.png",
    ),
    "dhelix plan --skew 0,1": ("dhelix plan --skew 0,1", 1, "give one step"),
    "dhelix plan plan.json --trace DIR": ("dhelix plan plan.json --trace .", 1, "record one with jax.profiler.trace"),
    "dhelix train --trace DIR": (
        "dhelix train --cpu_devices 2 --mesh dp=1,tp=2 --layers 1 --steps 3 --trace trace", 0,
        "wrote a profiler trace of step 3 to trace",
    ),
    "dhelix fold --layers 32 --stages 4 --microbatches 12 --out fold.svg": ("", 0, "wrote fold.svg"),
}  # fmt: skip
WRITTEN = "fold.svg pairs.png plan.json plan.png timeline.png trace.pb".split()


def commands() -> list[str]:
    """Of the README's blocks and of its sentences, in their order; names of commands alone are none."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    blocks = re.findall(r"^    (dhelix .*?)(?: +#.*)?$", text, re.MULTILINE)
    inline = re.findall(r"`(dhelix [^`]+ [^`]+)`", text)
    return list(dict.fromkeys(" ".join(found.split()) for found in (*blocks, *inline)))


def test_every_command_has_its_run() -> None:
    assert set(commands()) == set(RUNS)


@pytest.mark.slow
@pytest.mark.deviceless
def test_the_commands_run(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    (tmp_path / "corpus.txt").write_text("a text of some length\n" * 1000)
    dump = ROOT / "tests" / "testdata" / "collective_schedule" / "gather_under_product.hlo"
    (tmp_path / "dump.hlo").write_text(dump.read_text())
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "COLUMNS": "160"}
    for command in commands():
        line, status, words = RUNS[command]
        program = [sys.executable, "-m", *shlex.split(line or command)]
        done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        assert (done.returncode, words in said) == (status, True), f"{command}\n{said[-2000:]}"
        assert "Traceback" not in said
    assert all((tmp_path / name).stat().st_size for name in WRITTEN)
