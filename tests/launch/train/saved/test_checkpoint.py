"""A checkpoint can be restored on any mesh. One of another model is refused, and the error names what differs."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dhelix.launch.train.saved.checkpoint import CheckpointError, Checkpoints
from dhelix.models import TrainState, make_mesh

CONFIG = {"name": "small", "model": {"hidden": 16, "layers": 2}}


def make_state(hidden: int = 16, dp: int = 2, optimizer: optax.GradientTransformation | None = None) -> TrainState:
    params = {"embedding": np.arange(8.0 * hidden, dtype=np.float32).reshape(8, hidden)}
    optimizer = optimizer or optax.adam(1e-3)
    rows = NamedSharding(make_mesh(dp, 8 // dp), PartitionSpec("dp"))
    params = jax.device_put(params, rows)
    return TrainState(params, optimizer.init(params), jnp.int32(3))


def abstract(state: TrainState) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save(folder: Path, step: int = 3) -> TrainState:
    state = make_state()
    with Checkpoints(folder, CONFIG, notes={"data": "a text"}) as checkpoints:
        checkpoints.save(step, state)
    return state


def restore(folder: Path, like: TrainState | None = None, **config: Any) -> tuple[int, TrainState]:
    with Checkpoints(folder, CONFIG | config) as checkpoints:
        return checkpoints.restore(abstract(like or make_state()))


def test_a_state_comes_back_on_another_mesh(tmp_path: Path) -> None:
    state = save(tmp_path)
    other = make_state(dp=4)
    step, restored = restore(tmp_path, other)
    assert step == 3
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, other)
    with Checkpoints(tmp_path, {}) as checkpoints:
        assert checkpoints.notes(3) == {"data": "a text"}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, {}, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": jnp.arange(8)})
        checkpoints.wait()
        assert checkpoints.latest_step == 3
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["2", "3"]


@pytest.mark.parametrize(
    ("like", "config", "says"),
    [
        ({}, {"model": {"hidden": 16, "layers": 4}}, "model.layers is 2, and this run's is 4"),
        ({}, {"name": "large"}, "name is small, and this run's is large"),
        ({"hidden": 32}, {}, r"params.embedding is float32\[8,16\], and this run's is float32\[8,32\]"),
        ({"optimizer": optax.sgd(0.1)}, {}, "opt_state.*this run's is absent"),
        (
            {"optimizer": optax.adam(1e-3, mu_dtype=jnp.bfloat16)},
            {},
            r"opt_state.*float32\[.*, and this run's is bfloat16\[",
        ),
    ],
)
def test_a_checkpoint_of_another_model_names_what_differs(tmp_path: Path, like: Any, config: Any, says: str) -> None:
    save(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=says) as caught:
        restore(tmp_path, make_state(**like), **config)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in .*leave out --resume"):
        restore(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        restore(tmp_path / "file")


def test_a_foreign_or_unfinished_checkpoint_is_not_taken_for_one(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    assert restore(tmp_path)[0] == 3
    (tmp_path / "12").mkdir()
    with pytest.raises(CheckpointError, match="12 was not written by `dhelix train`"):
        restore(tmp_path)


def test_a_damaged_checkpoint_says_which_one_is_left(tmp_path: Path) -> None:
    save(tmp_path)
    save(tmp_path, step=5)
    for file in (tmp_path / "5" / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(CheckpointError, match=r"step 5 in .* is damaged .*; delete its folder .* of step 3"):
        restore(tmp_path)


def test_newer_checkpoints_are_set_aside_when_an_older_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / "set_aside_1").mkdir()
    with Checkpoints(tmp_path, {}) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": jnp.full(8, step)})
        checkpoints.wait()
        assert checkpoints.restore({"x": jnp.zeros(8, int)}, 1)[1]["x"].tolist() == [1] * 8
        with pytest.raises(CheckpointError, match="no checkpoint of step 4 .* give --resume_step one of 1, 2, 3"):
            checkpoints.chosen(4)
        assert checkpoints.set_aside(3) is None and checkpoints.latest_step == 3
        assert str(checkpoints.set_aside(1)).endswith("set_aside_2: the checkpoints of steps 2, 3")
        assert checkpoints.latest_step == 1
        checkpoints.save(2, {"x": jnp.full(8, 5)})
        checkpoints.wait()
    assert sorted(path.name for path in tmp_path.glob("*/")) == ["1", "2", "set_aside_1", "set_aside_2"]
    for folder, value in ((tmp_path, 5), (tmp_path / "set_aside_2", 2)):
        with Checkpoints(folder, {}) as checkpoints:
            assert checkpoints.restore({"x": jnp.zeros(8, int)}, 2)[1]["x"][0] == value


def test_a_move_that_is_killed_in_the_middle_leaves_checkpoints_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(tmp_path, {}) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": jnp.arange(8)})
        checkpoints.wait()
    rename, moved = Path.rename, list[str]()

    def once(path: Path, target: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(path.name)
        return rename(path, target)

    with Checkpoints(tmp_path, {}) as checkpoints, pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(Path, "rename", once)
        checkpoints.set_aside(1)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.rglob("[123]")) == ["1", "2", "3"]
    with Checkpoints(tmp_path, {}) as checkpoints:
        assert checkpoints.latest_step == 2 and "set_aside_2" in str(checkpoints.set_aside(1))


def test_a_folder_that_cannot_be_made() -> None:
    with pytest.raises(CheckpointError, match="no checkpoint can be written to /proc/nothing"):
        Checkpoints("/proc/nothing", {})


def test_a_full_disk_is_one_error_that_names_the_newest_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, step=3)

    def full(*_: Any, **__: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Error writing ...\nmore lines")

    with pytest.raises(
        CheckpointError, match="no space is left on the disk; free some.*--resume continues from step 3"
    ):
        with Checkpoints(tmp_path, {}) as checkpoints:
            monkeypatch.setattr(checkpoints._manager, "save", full)
            checkpoints.save(4, make_state())
