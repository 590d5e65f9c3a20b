"""TensorBoard files: the scalars of each step, also of a run that resumed in the same folder."""

from pathlib import Path

import pytest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from dhelix.errors import DhelixError
from dhelix.launch.train import loop, trainer
from dhelix.launch.train.watch.tensorboard import TensorBoard


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """All scalars of a folder by name and step, in the order of its files."""
    found: dict[tuple[str, int], float] = {}
    for file in sorted(folder.glob("events*")):
        data, at = file.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            at += size + 16
    return found


def test_scalars_of_steps(tmp_path: Path) -> None:
    run = trainer.prepare(trainer.Options(layers=1, seq=16, steps=3, data=__file__, peak_tflops=1.0))
    with TensorBoard(str(tmp_path), run) as board:
        board.write(loop.Step(1, 2.0, 0.5, 1.0))
        board.write(loop.Step(2, 1.5, 0.5, 1.0, {"dropped": 0.25}, evaluation=1.75))
    found = scalars(tmp_path)
    assert found["loss", 1] == 2.0 and found["dropped", 2] == 0.25 and found["evaluation/loss", 2] == 1.75
    assert found["speed/tokens_per_second", 2] == run.tokens_per_step and ("speed/mfu", 2) in found
    assert ("speed/tokens_per_second", 1) not in found and ("learning_rate", 2) in found


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = trainer.prepare(trainer.Options(layers=1, seq=16, steps=3, data=__file__))
    with pytest.raises(DhelixError, match="cannot be written"):
        TensorBoard(str(tmp_path / "file"), run)


def test_a_full_disk_ends_the_file_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = trainer.prepare(trainer.Options(layers=1, seq=16, steps=3, data=__file__)), list[str]()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with TensorBoard(str(tmp_path), run, said.append) as board:
        monkeypatch.setattr(EventsWriter, "write_event", full)
        for number in (1, 2):
            board.write(loop.Step(number, 2.0, 0.5, 1.0))
    assert len(said) == 1 and "No space left" in said[0]
