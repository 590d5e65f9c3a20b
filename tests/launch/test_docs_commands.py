"""Every command of README.md and docs/guide/ runs as it is printed, in an empty folder with an empty home folder.

Commands marked `# needs GPUs` do not run. Their flags must be flags of the command.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers

from dhelix.launch import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]

SMALL_PLAN = "dhelix plan --preset llama-demo --layers 2 --seq 128 --mesh tp=2 --microbatches 3 --settings connections1"
SMALLER = {
    "dhelix plan --preset llama-8b --layers 8 --mesh tp=4 --microbatches 16": SMALL_PLAN,
    "dhelix plan --preset llama-8b --layers 2 --microbatches 4 --mesh tp=4 --settings connections1 --out plan.json"
    " --picture plan.png": f"{SMALL_PLAN} --out plan.json --picture plan.png",
    "dhelix train --cpu_devices 8 --pp 2 --mesh dp=2,tp=2 --steps 5":
    "dhelix train --cpu_devices 8 --pp 2 --mesh dp=2,tp=2 --steps 2 --layers 4 --seq 16 --microbatches 2",
    "dhelix train --cpu_devices 4 --pp 2 --mesh dp=1,tp=2 --steps 3 --pipeline interleaved_si":
    "dhelix train --cpu_devices 4 --pp 2 --mesh dp=1,tp=2 --steps 2 --pipeline interleaved_si --layers 4 --seq 16"
    " --microbatches 3",
    "dhelix train --preset phi-moe-demo --cpu_devices 8 --mesh dp=2,ep=4,tp=1 --steps 4":
    "dhelix train --preset phi-moe-demo --cpu_devices 8 --mesh dp=2,ep=4,tp=1 --steps 2 --layers 2 --seq 16",
    "dhelix train --preset phi-moe-demo --cpu_devices 8 --mesh dp=2,ep=2,tp=1 --pp 2 --steps 3":
    "dhelix train --preset phi-moe-demo --cpu_devices 8 --mesh dp=2,ep=2,tp=1 --pp 2 --steps 2 --seq 16"
    " --microbatches 2",
    "dhelix launch --processes 2 --cpu_devices 2 -m dhelix train --steps 2":
    "dhelix launch --processes 2 --cpu_devices 2 -m dhelix train --steps 2 --layers 2 --seq 16 --microbatches 2",
    "dhelix plan --preset llama-8b --layers 4 --seq 32768 --mesh dp=1,cp=2,tp=1 --settings default":
    "dhelix plan --preset llama-demo --layers 2 --seq 128 --mesh dp=1,cp=2,tp=1 --microbatches 3 --settings default",
}  # fmt: skip
"""Commands that take minutes, and the smaller commands that run instead."""

INCLUDES = {f"{SMALL_PLAN} --out plan.json --picture plan.png": SMALL_PLAN}
"""Commands that do everything that another command does. The other command does not run."""


TEXTS = [f"The {what} of number {n} is a number." for n in range(60) for what in ("square", "double", "half")]


def tokenizer() -> str:
    """A tokenizer of 512 tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = tokenizers.trainers.BpeTrainer(vocab_size=512, special_tokens=["</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(TEXTS, how)
    return made.to_str()


INPUTS = {
    "corpus.jsonl": "\n".join(json.dumps({"text": text}) for text in TEXTS),
    "tokenizer.json": tokenizer(),
    "node.xml": (ROOT / "tests" / "testdata" / "topologies" / "pcie-8.xml").read_text(),
    "leaves.json": json.dumps({"nodes": [{"name": f"node-{n}", "leaf": f"leaf-{n % 2}"} for n in range(4)]}),
}
"""Files that the commands read, and that a page describes."""


@dataclass(frozen=True)
class Command:
    page: str
    line: str
    runs_here: bool


def commands() -> Iterator[Command]:
    """The commands in indented blocks. A line that ends in a backslash continues on the next line."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^    ((?:[A-Z_]+=\S+ )*dhelix \w+(?!:)\b.*)$", text, re.MULTILINE):
            command, _, comment = line.partition(" #")
            yield Command(page.name, " ".join(command.split()), "needs" not in comment)


def test_flags_of_commands_that_need_gpus_exist(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = []
    for command in commands():
        # In `dhelix launch -m dhelix train`, each command has its own flags.
        for name, *arguments in map(str.split, re.split(r"(?:-m )?\bdhelix ", command.line)[1:]):
            with pytest.raises(SystemExit):
                cli.main([name, "--help"])
            known = capsys.readouterr().out
            flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
            unknown += [
                f"{command.page}: {command.line}: {flag}" for flag in flags if not re.search(rf"{flag}\b", known)
            ]
    assert not unknown


WRITTEN = {
    "inspect.md": "timeline.png step.html",
    "pipeline.md": "fold.svg",
    "plan.md": "plan.json plan.png",
    "profile.md": "pairs.png",
    "sharding.md": "shard.svg plan.json",
    "train.md": "model1/config.json model1/model.safetensors model1/tokenizer.json",
}
"""Files that the commands of a page write."""


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize("page", sorted({c.page for c in commands() if c.runs_here}))
def test_commands_run(page: str, tmp_path: Path) -> None:
    """A page's commands run in order, in one folder. What an earlier page has, too, runs only there."""
    (home := tmp_path / "home").mkdir()
    kernels = f"--xla_gpu_kernel_cache_file={tmp_path}/kernels"  # machine code that the commands share
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "COLUMNS": "160", "XLA_FLAGS": kernels}
    for name, text in INPUTS.items():
        (tmp_path / name).write_text(text)
    lines: dict[str, str] = {}
    for command in commands():
        if command.runs_here:
            lines.setdefault(SMALLER.get(command.line, command.line), command.page)
    for line in [line for line, first in lines.items() if first == page]:
        if any(line == less and more in lines for more, less in INCLUDES.items()):
            continue
        *settings, program = re.split(r" (?=dhelix )", line) if "=" in line.split()[0] else [line]
        variables = {name: value for word in " ".join(settings).split() for name, _, value in [word.partition("=")]}
        words = [sys.executable, "-m", *shlex.split(program)]
        done = subprocess.run(
            words, env={**environment, **variables}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0 and "Traceback" not in said, f"{line}\n{said[-2000:]}"
    for written in WRITTEN.get(page, "").split():
        assert (tmp_path / written).stat().st_size
