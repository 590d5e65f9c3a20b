"""Damaged checkpoints and wrong parameters: one error that names the file or the tensor, and nothing half-written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dhelix.models.huggingface import files
from dhelix.models.huggingface.files import WeightsError
from dhelix.models.huggingface.weights import read, write
from dhelix.tests.models.huggingface.stored import FOLDER, copied, tensors_of

Q, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(DOWN), f"lacks the tensor {DOWN}; config.json and the files must be of one checkpoint"),
        (lambda t: (t.pop(DOWN), t.pop(Q)), r"lacks the tensor .* \(and 1 more\)"),
        (lambda t: t.update(extra=np.ones(2)), "has the tensor extra, which the model of config.json does not have"),
        (lambda t: t.update({Q: t[Q].T.copy()}), rf"{Q} has shape \[16, 32\], but by config.json it is \[32, 16\]"),
        (lambda t: t.update({Q: t[Q].astype("float16")}), f"{Q} is float16; give the type of all, dtype='float32'"),
        (lambda t: t.update({Q: t[Q].astype("int8")}), f"{Q} has type I8, and dhelix reads F32, BF16, F16"),
    ],
)
def test_wrong_tensors(change: Any, says: str, tmp_path: Path) -> None:
    tensors = tensors_of(FOLDER / "llama")
    change(tensors)
    with pytest.raises(WeightsError, match=says):
        read(copied("llama", tmp_path, tensors))


def test_several_types_become_the_one_that_is_asked_for(tmp_path: Path) -> None:
    tensors = tensors_of(FOLDER / "llama")
    folder = copied("llama", tmp_path, tensors | {Q: tensors[Q].astype("float16")})
    assert read(folder, "float32")[0].param_dtype == "float32"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("name", "file", "harm", "says"),
    [
        ("llama", "config.json", Path.unlink, "llama has no config.json; give the folder"),
        ("llama", "config.json", lambda path: path.write_text("{"), "config.json cannot be read as JSON"),
        ("llama", "config.json", lambda path: path.write_text("[]"), "config.json holds no JSON object"),
        ("llama", "model.safetensors", Path.unlink, "neither model.safetensors nor model.safetensors.index.json"),
        (
            "llama",
            "model.safetensors",
            lambda path: path.rename(path.with_name("pytorch_model.bin")),
            "but pytorch_mo",
        ),
        ("llama", "model.safetensors", _truncate, "model.safetensors is truncated or damaged"),
        ("llama", "model.safetensors", lambda path: path.write_bytes(b""), "model.safetensors is truncated or damaged"),
        ("tied", "model-00002-of-00006.safetensors", Path.unlink, r"model-00002-of-00006.safetensors \(1 of 6 files"),
        ("tied", "model-00003-of-00006.safetensors", _truncate, "model-00003-of-00006.safetensors is truncated"),
        ("tied", "model.safetensors.index.json", lambda path: path.write_text("{}"), "has no weight_map"),
    ],
)
def test_damaged_files(name: str, file: str, harm: Any, says: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    harm(folder / file)
    with pytest.raises(WeightsError, match=says):
        read(folder)


@pytest.mark.parametrize(
    ("tensor", "home", "says"),
    [
        (
            "model.norm.weight",
            "../elsewhere",
            "model.norm.weight is in '../elsewhere', which is no file of this f",
        ),
        ("model.norm.weight", "model-00001-of-00006.safetensors", "lacks the tensor model.norm.weight"),
        ("extra", "model-00001-of-00006.safetensors", "model-00001-of-00006.safetensors lacks the tensor extra"),
    ],
)
def test_a_wrong_index(tensor: str, home: str, says: str, tmp_path: Path) -> None:
    folder = copied("tied", tmp_path)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][tensor] = home
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=says):
        read(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="nothing does not exist, so there is no config.json"):
        read(tmp_path / "nothing")


def test_shardings_of_another_tree() -> None:
    with pytest.raises(WeightsError, match="the shardings are not a tree like the parameters"):
        read(FOLDER / "llama", shardings={})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda params: params.pop("head"), "the parameters lack head"),
        (lambda params: params.update(more=params["head"]), "the parameters have more"),
        (lambda params: params.update(head=params["head"].T), r"head has shape \[64, 16\], but .* \[16, 64\]"),
        (lambda params: params.update(head=params["head"].astype("bfloat16")), "have type bfloat16 and float32; give"),
    ],
)
def test_parameters_of_another_model_are_not_written(change: Any, says: str, tmp_path: Path) -> None:
    config, params = read(FOLDER / "llama")
    change(params)
    with pytest.raises(WeightsError, match=says):
        write(tmp_path / "out", config, params)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_an_interrupted_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, params = read(FOLDER / "llama")
    written, save = [], files.save_file

    def full(*args: Any) -> None:
        if written:
            raise OSError("no space left on device")
        written.append(args[1])
        save(*args)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(WeightsError, match="no space left on device.; free space"):
        write(tmp_path / "out", config, params, file_bytes=8000)
    assert written and not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_stays_as_it_is(tmp_path: Path) -> None:
    config, params = read(FOLDER / "llama")
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(WeightsError, match="exists already; give a new folder"):
        write(tmp_path, config, params)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", config, params)
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["config.json", "model.safetensors"]
