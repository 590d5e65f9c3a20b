"""The loop of training: losses that are no numbers, signals, what is saved, and what a resumed run is told."""

import io
import os
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dhelix.errors import DhelixError
from dhelix.launch.train import loop, trainer
from dhelix.launch.train.command import say_resumed
from dhelix.launch.train.saved.checkpoint import Checkpoints
from dhelix.launch.train.watch import results

NAN = float("nan")


def fake_run(losses: list[float], **options: Any) -> loop.Run:
    """A run whose step returns these losses, one after the other. The state counts the steps."""
    given = {"layers": 1, "seq": 16, "steps": len(losses), "save_every": 1, "data": __file__} | options
    run = trainer.prepare(trainer.Options(**given))

    def step(state: Any, batch: Any) -> Any:
        assert batch["tokens"].shape == (run.batch, 17)
        return {"steps": state["steps"] + 1}, {"loss": losses[int(state["steps"])], "grad_norm": 1.0}

    run.step, run.state = step, {"steps": jnp.int32(0)}
    return run


def test_a_loss_that_is_no_number_stops_the_run_and_its_batch_is_written(tmp_path: Path) -> None:
    run = fake_run([2.0, 1.0, NAN, 1.0], checkpoint_dir=str(tmp_path))
    with Checkpoints(tmp_path, {}) as checkpoints:
        with pytest.raises(DhelixError, match="the loss of step 3 is nan; its batch is in .*bad_batch_3_0.npz"):
            loop.train(run, checkpoints)
    with Checkpoints(tmp_path, {}) as checkpoints:
        assert checkpoints.latest_step == 2
    with np.load(tmp_path / "bad_batch_3_0.npz") as kept:
        assert kept["first_row"] == 2 * run.batch
        np.testing.assert_array_equal(kept["tokens"][1], run.batches.row(2 * run.batch + 1)["tokens"])


def test_a_first_loss_that_is_no_number_blames_what_was_read(tmp_path: Path) -> None:
    with pytest.raises(DhelixError, match="before this run has updated anything"):
        loop.train(fake_run([NAN], checkpoint_dir=str(tmp_path)))


def test_steps_that_are_not_finite_are_skipped_if_asked_to(tmp_path: Path) -> None:
    steps = loop.train(fake_run([2.0, NAN, 1.0], on_nan="skip", checkpoint_dir=str(tmp_path)))
    assert [step.skipped for step in steps] == [False, True, False]
    assert (tmp_path / "bad_batch_2_0.npz").exists() and str(steps[1]).endswith("skipped")
    with pytest.raises(DhelixError, match="10 steps in a row had a loss"):
        loop.train(fake_run([2.0] + [NAN] * 12, on_nan="skip", checkpoint_dir=str(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_after_the_step_and_saves(number: int, tmp_path: Path) -> None:
    run, said = fake_run([2.0, 1.0, 1.0, 1.0], save_every=None), list[str]()

    def interrupt(steps: list[loop.Step]) -> None:
        if len(steps) == 2:
            os.kill(os.getpid(), number)

    with Checkpoints(tmp_path, {}) as checkpoints, loop.Stopping(lambda: said.append("ends")) as wish:
        steps = loop.train(run, checkpoints, interrupt, wish.wished)
        checkpoints.wait()
        assert len(steps) == 2 and checkpoints.latest_step == 2 and checkpoints.notes(2)["rows"] == 2 * run.batch
    assert said == ["ends"] and loop.exit_status(wish.signal) == 128 + number
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_ends_at_once() -> None:
    with loop.Stopping(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)


def test_what_changes_the_rows_of_a_resumed_run_is_said(tmp_path: Path) -> None:
    run, text = fake_run([1.0]), io.StringIO()
    with Checkpoints(tmp_path, {}, notes=trainer.notes(run) | {"seed": 5, "batch": 2}) as checkpoints:
        loop.train(run, checkpoints)
        checkpoints.wait()
        run.first = 1
        say_resumed(run, checkpoints, Console(file=text, width=200))
    assert "note: seed was 5 and is now 0, so the rows differ" in text.getvalue()
    assert f"a batch had 2 sequences and now has {run.batch}; the run continues" in text.getvalue()
    assert text.getvalue().count("note: ") == 2


def test_plain_steps_are_compared() -> None:
    run = fake_run([1.0] * 22, compare_plain=True, save_every=None)
    run.plain_step = run.step
    steps = loop.train(run)
    assert [step.number for step in steps if step.plain] == list(range(12, 22))
    assert "without passes ->" in (results.measured_gain(steps) or "")
    assert results.measured_gain(steps[:11]) is None
    assert "left" in results.time_left(run, steps[:5])
