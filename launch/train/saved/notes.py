"""What a checkpoint says of its run, and what has changed when a run resumes from it.

    notes(run)                  {"preset": ..., "batch": 8, "data": ..., "settings": {"lr": 0.001, "steps": 100, ...}}
    changes(before, run)        "lr was 0.001 and is now 0.0003"

A change is said, because nothing else tells it: the run goes on, but not as an unbroken one. Older checkpoints store no
settings, so nothing is said of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dhelix.launch.train import optimizers
from dhelix.launch.train.loop import Run
from dhelix.launch.train.saved.checkpoint import CheckpointError

OPTIMIZER = "optimizer"


def notes(run: Run) -> dict[str, Any]:
    """Values that a checkpoint stores only so that messages can name them."""
    settings = {OPTIMIZER: run.options.optimizer, **_settings(run)}
    return {"preset": run.options.preset, "batch": run.batch, **_of_rows(run), "settings": settings}


def changes(before: Mapping[str, Any], run: Run) -> Iterator[str]:
    """A sentence for each value that differs in the notes of a checkpoint and in the run that resumes from it."""
    for name, now in _of_rows(run).items():
        if before.get(name) != now:
            change = f"{name} was {before.get(name)} and is now {now}"
            if name == "data" and str(before.get(name)).count("-") > 2:  # not in the oldest checkpoints
                change = run.batches.rows.documents.change_from(before[name])
            yield f"{change}, so the rows differ from those of an uninterrupted run"
    if before.get("batch") != run.batch:
        change = f"a batch had {before.get('batch')} sequences and now has {run.batch}"
        yield f"{change}; the run continues with the row after the last one"
    stored = before.get("settings", {})
    for name, now in _settings(run).items():
        if name in stored and stored[name] != now:
            ends = name == "steps" and run.options.lr_schedule != "constant"
            schedule = "; the schedule of the learning rate ends there, so the rate jumps" if ends else ""
            yield f"{name} was {_said(stored[name])} and is now {_said(now)}{schedule}"


def check_optimizer(before: Mapping[str, Any], run: Run, where: str) -> None:
    """Raises CheckpointError if the checkpoint says that another optimizer wrote it."""
    stored, now = before.get("settings", {}).get(OPTIMIZER), run.options.optimizer
    if stored not in (None, now):
        raise CheckpointError(
            f"{where} has the state of {stored}, but this run trains with {now}; give --optimizer {stored}, or another "
            "--checkpoint_dir"
        )


def _settings(run: Run) -> dict[str, Any]:
    """The values that may change when a run resumes. Where a flag has no value, it is the one that the run takes."""
    options = run.options
    names = ("lr", "lr_schedule", "lr_end", "steps", "clip", "z_loss", "microbatches")
    found = {name: getattr(options, name) for name in names}
    found |= {"warmup": optimizers.warmup_steps(options), "decay_steps": optimizers.decay_steps(options)}
    return found | {"optimizer_options": optimizers.values_in_words(options)}


def _of_rows(run: Run) -> dict[str, Any]:
    """The values that determine the rows."""
    rows = run.batches.rows
    return {
        "data": rows.documents.fingerprint, "seq": run.seq, "seed": run.options.seed, "masked": rows.masked,
    }  # fmt: skip


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value in (None, "") else str(value)
