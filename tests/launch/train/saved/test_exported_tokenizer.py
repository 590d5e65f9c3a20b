"""The tokenizer beside an exported model, as transformers reads it. Files of a checkpoint come back byte for byte."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from dhelix.launch.train import trainer
from dhelix.launch.train.saved import exported_tokenizer

MODEL = Path(__file__).parents[3] / "testdata" / "huggingface" / "llama"
END = "</s>"


def tokenizer(folder: Path) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, END: 1, "b": 2}, "a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens([END])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def written(folder: Path, tokenizer: str | None, **options: Any) -> exported_tokenizer.Beside:
    (folder / "text").write_text("a b " * 200)
    given: dict[str, Any] = {"data": str(folder / "text"), "tokenizer": tokenizer} | options
    run = trainer.prepare(trainer.Options(seq=16, microbatches=1, mesh="dp=1,tp=1", **given))
    found = exported_tokenizer.of(run, tokenizer, 16)
    (folder / "out").mkdir()
    found.write(folder / "out")
    return found


def test_the_end_of_a_text_is_known(tmp_path: Path) -> None:
    file = tokenizer(tmp_path)
    cache = str(tmp_path / "cache")
    assert written(tmp_path, str(file), layers=1, token_cache=cache).ids == {
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip
    fields = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    assert fields["tokenizer_config.json"]["eos_token"] == END
    assert fields["generation_config.json"] == {"eos_token_id": 1}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == file.read_bytes()


def test_bytes_are_a_tokenizer_too(tmp_path: Path) -> None:
    assert written(tmp_path, None, layers=1).ids["eos_token_id"] == 0
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "def f():\n\t'\u00e9\u65e5 \u0100'\x7f"
    assert made.encode(text).ids == list(text.encode()) and made.decode(made.encode(text).ids) == text
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert made.token_to_id(config["eos_token"]) == 0


def test_files_of_the_checkpoint_are_copied(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    file = tokenizer(folder)
    texts = {
        "tokenizer_config.json": '{"eos_token":   "b"}',
        "special_tokens_map.json": "{ }",
        "generation_config.json": '{"eos_token_id": [1,2]}',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    fields = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [1, 2], "bos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(fields))
    np.save(tmp_path / "ids.npy", np.arange(600, dtype=np.uint16) % 3)
    found = written(tmp_path, str(file), init_from=str(folder), data=str(tmp_path / "ids.npy"))
    assert (found.ids["eos_token_id"], found.ids["bos_token_id"]) == ([1, 2], 0)
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == texts | {
        "tokenizer.json": file.read_text()
    }
