"""`make demo`: shows what dhelix does, on any machine, without a GPU.

1. Trains a small Llama on real text on 8 CPU devices (dp 2 x tp 4) twice, side by side: plain, and with interleaved
   strands. Both runs see the same batches, and the demo compares their losses.
2. Compiles the train step of Llama-8B shapes for 4 H200s both ways and shows how the two GPU programs differ:
   timelines, exposed communication, memory. Needs the extra `compile`.

The results are in the folder `demo-output/`: timeline.png, report.json, and both GPU programs for `dhelix inspect`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from dhelix.errors import DhelixError
from dhelix.launch.inspect import command as inspect
from dhelix.launch.inspect.command import inspect_compiled
from dhelix.launch.inspect.flags import AUTO
from dhelix.launch.inspect.inspection import Inspection
from dhelix.launch.shown.progress import say
from dhelix.launch.train import trainer
from dhelix.launch.train.command import summary
from dhelix.launch.train.optimizers import optimizer
from dhelix.models import Training, make_train_step, preset
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.passes.framework.report import Report
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import compiled_module

OUTPUT = Path("demo-output")
TRAINING = trainer.Options(mesh="dp=2,tp=4", microbatches=4, batch=16, steps=60, lr=3e-3)
TENSOR_PARALLEL, MICROBATCHES = 4, 16
_LINES, _BAR = 15, 40  # number of steps to show; length of the bar for the first loss, in characters


@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of both runs at one step, in nats per token."""

    step: int
    plain: float
    interleaved: float

    @property
    def difference(self) -> float:
        return abs(self.plain - self.interleaved)


def main() -> int:
    """Runs the demo. Returns the exit status: 1 if interleaving changed a loss or something failed, else 0."""
    begun = time.perf_counter()
    deviceless.prepare_environment()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    console = Console()
    try:
        report = demonstrate(TRAINING, preset("llama-8b", layers=8), MICROBATCHES, OUTPUT, console)
    except DhelixError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    say(console, f"\nTook {time.perf_counter() - begun:.0f} s.")
    return int(report["largest_difference"] > 0)


def demonstrate(
    options: trainer.Options, config: DecoderConfig, microbatches: int, output: Path, console: Console
) -> dict[str, Any]:
    """Runs both parts of the demo.

    Args:
      options: the training run of part 1.
      config: the model that part 2 compiles.
      microbatches: micro-batches per step in part 2.
      output: folder for all results, created if missing.

    Returns:
      The report that is also written to `output / "report.json"`.

    Raises:
      DhelixError: training, compiling or inspecting failed.
    """
    output.mkdir(parents=True, exist_ok=True)
    # 1. Train both ways on CPU devices.
    say(console, "1. Trains a small Llama on 8 CPU devices, plain and interleaved side by side\n")
    losses, passes = train(options, console)
    largest = max(entry.difference for entry in losses)
    say(console, f"\nLargest difference of {len(losses)} losses: {largest:g}. What the passes did:")
    _say_passes(passes, console)
    report: dict[str, Any] = {
        "losses": [dataclasses.asdict(entry) for entry in losses],
        "largest_difference": largest,
        "passes_cpu": json.loads(passes.to_json()),
    }

    # 2. Compile both ways for GPUs.
    name = f"{config.layers} layers of Llama-8B shapes, sequence {config.seq}, {microbatches} micro-batches"
    say(console, f"\n2. {name}, compiled for {TENSOR_PARALLEL} H200s without a GPU\n")
    try:
        mesh = deviceless.mesh({"dp": 1, "tp": TENSOR_PARALLEL}, "h200")
    except deviceless.DevicelessError as error:
        say(console, f"Left out: {error}")
    else:
        training = make_train_step(config, mesh, optimizer(trainer.Options()), microbatches)
        found, passes = compile_both(training, output, console)
        console.print(comparison(found))
        say(console, f"Estimates from the {found[0].cost_model}; the steps were not run. What the passes did:")
        _say_passes(passes, console)
        report["programs"] = json.loads(inspect.to_json(found))
        report["passes_gpu"] = json.loads(passes.to_json())
        picture = output / "timeline.png"
        inspect.save_png(found, picture, f"{name}, TP = SP = {TENSOR_PARALLEL}, on {TENSOR_PARALLEL} H200s")
        say(console, _WHERE_TO_LOOK.format(output=output, picture=picture))
    (output / "report.json").write_text(json.dumps(report, indent=1))
    say(console, f"All numbers, per collective and per pass: {output / 'report.json'}")
    return report


_WHERE_TO_LOOK = """
Look at {picture}
  red    exposed communication: nothing computes meanwhile, so the step waits for it
  green  hidden communication: it overlaps with computation
  The two upper panels show a whole step, plain and interleaved; the next two one layer of each, and the last two the
  memory of a GPU. The plain step runs forward and backward in turn. The interleaved step runs the forward of one
  micro-batch (blue) together with the backward of the previous one (orange), so the communication of each hides under
  the computation of the other.

To see what hides each collective:
  .venv/bin/dhelix inspect {output}/plain.hlo.pb --compare {output}/interleaved.hlo.pb --profile auto"""


def train(options: trainer.Options, console: Console) -> tuple[list[Losses], Report]:
    """Trains plain and interleaved, one step of each in turn. Both runs have the same initial parameters and batches.

    Returns:
      The losses of every step, and the report of the passes.
    """
    plain = trainer.prepare(dataclasses.replace(options, plain=True))
    trainer.start(plain)
    interleaved = dataclasses.replace(
        plain,
        options=dataclasses.replace(options, plain=False),
        step=trainer.make_step(plain.training, plain=False),
        state=jax.tree.map(jnp.copy, plain.state),
    )
    say(console, f"{'step':>4}  {'plain':>8}  {'interleaved':>11}  {'difference':>10}")
    shown = max(1, options.steps // _LINES)
    losses: list[Losses] = []
    for one, other in zip(plain.take_steps(), interleaved.take_steps(), strict=True):
        entry = Losses(one.number, one.loss, other.loss)
        losses.append(entry)
        if entry.step % shown == 0 or entry.step in (1, options.steps):
            bar = "▇" * round(_BAR * entry.interleaved / losses[0].interleaved)
            numbers = f"{entry.step:>4}  {entry.plain:8.5f}  {entry.interleaved:11.5f}  {entry.difference:10g}"
            say(console, f"{numbers}  {bar}")
    report = interleaved.report()
    assert report is not None  # only plain runs have no report
    return losses, report


def compile_both(training: Training, output: Path, console: Console) -> tuple[tuple[Inspection, Inspection], Report]:
    """Compiles the plain and the interleaved step for GPUs, and writes both programs to the folder `output`.

    Returns:
      The inspections of the plain and of the interleaved program, and the report of the passes.
    """
    arguments = training.abstract_state(), training.abstract_batch(training.microbatches)
    found = []
    interleaved = trainer.make_step(training, plain=False)
    for name, step in (("plain", trainer.make_step(training, plain=True)), ("interleaved", interleaved)):
        begun = time.perf_counter()
        compiled = deviceless.compile(step.lower(*arguments))
        say(console, f"{name}: compiled in {time.perf_counter() - begun:.1f} s")
        program = output / f"{name}.hlo.pb"
        program.write_bytes(compiled_module(compiled).to_bytes())
        found.append(inspect_compiled(compiled, "H200", name, str(program), profile=AUTO))
    return (found[0], found[1]), interleaved.report(*arguments)


def comparison(found: tuple[Inspection, Inspection]) -> Table:
    """A table that shows both programs side by side."""
    table = Table(title="\nOne step on one GPU", title_justify="left", title_style="bold")
    for heading in ("", "plain", "interleaved", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    rows: list[tuple[str, list[float], str]] = [
        ("step, estimated", [i.step_ms for i in found], "ms"),
        ("communication exposed, estimated", [i.exposed_ms for i in found], "ms"),
        ("communication hidden, estimated", [i.hidden_ms for i in found], "ms"),
        ("large copies in loops, estimated", [sum(c.total_ms for c in i.copies) for i in found], "ms"),
        ("memory, temporaries", [i.memory.temporaries / 2**30 for i in found if i.memory], "GiB"),
        ("memory, peak", [i.memory.peak / 2**30 for i in found if i.memory], "GiB"),
    ]
    for name, numbers, unit in rows:
        if len(numbers) == 2:
            ratio = f"{numbers[1] / numbers[0]:.2f}" if numbers[0] else ""
            digits = 0 if unit == "ms" else 2
            table.add_row(name, *(f"{number:,.{digits}f} {unit}" for number in numbers), ratio)
    return table


def _say_passes(report: Report, console: Console) -> None:
    for line in summary(report):
        say(console, f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
