"""The loop of training: losses that are no numbers, signals, what is saved, and what a resumed run is told."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.launch.train import loop, trainer
from dhelix.launch.train.saved import notes
from dhelix.launch.train.saved.checkpoint import Checkpoints
from dhelix.launch.train.watch import results

NAN = float("nan")


def fake_run(losses: list[float], norms: list[float] | None = None, **options: Any) -> loop.Run:
    """A run whose step returns these losses and norms of gradients, one after the other. The state counts the steps."""
    given = {"layers": 1, "seq": 16, "steps": len(losses), "save_every": 1, "data": __file__} | options
    run = trainer.prepare(trainer.Options(**given))

    def step(state: Any, batch: Any) -> Any:
        assert batch["tokens"].shape == (run.batch, 17)
        number = int(state["steps"])
        return {"steps": state["steps"] + 1}, {"loss": losses[number], "grad_norm": norms[number] if norms else 1.0}

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


def test_gradients_that_are_no_numbers_stop_the_run_before_their_update_is_saved(tmp_path: Path) -> None:
    run = fake_run([2.0, 1.0, 1.0], [1.0, NAN, 1.0], checkpoint_dir=str(tmp_path))
    with Checkpoints(tmp_path, {}) as checkpoints:
        with pytest.raises(DhelixError, match="the gradients of step 2 are not finite, at a loss of 1.0000; its batch"):
            loop.train(run, checkpoints)
        checkpoints.wait()
        assert checkpoints.latest_step == 1 and (tmp_path / "bad_batch_2_0.npz").exists()


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


def test_what_has_changed_when_a_run_resumes_is_said() -> None:
    run = fake_run([1.0] * 20)
    before = notes.notes(run)
    assert not list(notes.changes(json.loads(json.dumps(before)), run))
    found = list(notes.changes(before | {"seed": 5, "batch": 2}, run))
    assert found[0].startswith("seed was 5 and is now 0, so the rows differ")
    assert found[1].startswith(f"a batch had 2 sequences and now has {run.batch}; the run continues")
    assert len(found) == 2
    more = {"lr": 1e-4, "lr_schedule": "wsd", "steps": 30, "clip": 0.0, "z_loss": 1e-4, "optimizer_options": "b1=0.8"}
    run.options = dataclasses.replace(run.options, **more)
    assert list(notes.changes(before, run)) == [
        "lr was 0.001 and is now 0.0001",
        "lr_schedule was cosine and is now wsd",
        "steps was 20 and is now 30; the schedule of the learning rate ends there, so the rate jumps",
        "clip was 1 and is now 0",
        "z_loss was 0 and is now 0.0001",
        "warmup was 2 and is now 3",
        "decay_steps was none and is now 6",
        "optimizer_options was b2=0.95,weight_decay=0.1 and is now b1=0.8,b2=0.95,weight_decay=0.1",
    ]
    text = next(notes.changes(before | {"data": "bpe.json-1f-1-2345-0"}, run))
    assert re.match(
        r"data was 1 document with 2,345 tokens of bpe\.json-1f and is now 1 document .* of bytes, so", text
    )
    del before["settings"]
    assert not list(notes.changes(before, run)), "checkpoints of before have none"
    notes.check_optimizer(before, run, "it")


def test_another_optimizer_is_one_error_that_names_both() -> None:
    run = fake_run([1.0], optimizer="lion")
    with pytest.raises(DhelixError, match="it has the state of adamw, but this run trains with lion"):
        notes.check_optimizer({"settings": {"optimizer": "adamw"}}, run, "it")


@pytest.mark.parametrize(
    ("trace_steps", "says"),
    [("3-4", "steps 3 to 4: .* after step 4, .* give --trace_steps from 6 to 8"), (None, None), ("6", None)],
)
def test_steps_before_a_resumed_run_cannot_be_recorded(trace_steps: str | None, says: str | None) -> None:
    run = fake_run([1.0] * 8, trace="folder", trace_steps=trace_steps)
    run.first = 4
    assert (says is None) if (found := loop.untraceable(run)) is None else re.search(str(says), found)
    run.first = 7
    assert "a larger --steps" in str(loop.untraceable(run))


def test_plain_steps_are_compared() -> None:
    run = fake_run([1.0] * 22, compare_plain=True, save_every=None)
    run.plain_step = run.step
    steps = loop.train(run)
    assert [step.number for step in steps if step.plain] == list(range(12, 22))
    assert "without passes ->" in (results.measured_gain(steps) or "")
    assert results.measured_gain(steps[:11]) is None
    assert "left" in results.time_left(run, steps[:5])


def test_a_warm_up_that_is_too_long_is_said() -> None:
    said = list[str]()
    options = {"layers": 1, "seq": 16, "plain": True, "data": __file__, "steps": 3}
    trainer.prepare(trainer.Options(**options, warmup=3), said.append)
    assert not said
    trainer.prepare(trainer.Options(**options, warmup=4), said.append)
    assert said == ["note: --warmup 4 is longer than --steps 3, so --lr is never reached"]
