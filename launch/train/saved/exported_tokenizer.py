"""The tokenizer beside an exported model, so that transformers reads it and knows which token ends a text.

    beside = of(run, "tokenizer.json", seq=4096)
    beside.ids                   {"eos_token_id": 2, ...}, fields of config.json
    beside.write(folder)         tokenizer.json, tokenizer_config.json, generation_config.json

Of a checkpoint that the run started from, these files are copied byte for byte. A run on bytes has a tokenizer of 256
tokens, which are the bytes. The byte 0 is its end of text.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhelix.launch.train.data import tokenizers
from dhelix.launch.train.loop import Run
from dhelix.models.huggingface.configs import CONFIG
from dhelix.models.huggingface.files import read_json

_OF_TOKENIZER = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
_GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_END_OF_BYTES = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Beside:
    """What is written beside the weights.

    Attributes:
      ids: the ids of special tokens, as fields of config.json. An absent one would be transformers' default.
      texts: the files to write, by name.
      copied: the files to copy, by name. They win over `texts`.
    """

    ids: Mapping[str, Any]
    texts: Mapping[str, str]
    copied: Mapping[str, Path]

    def write(self, folder: Path) -> None:
        for name in self.texts.keys() - self.copied.keys():
            (folder / name).write_text(self.texts[name])
        for name, file in self.copied.items():
            shutil.copyfile(file, folder / name)


def of(run: Run, tokenizer: str | None, seq: int) -> Beside:
    """The files for the tokenizer of a run, which is a file or a folder; None: bytes, or tokens without a tokenizer."""
    origin = None if run.options.init_from is None else Path(run.options.init_from)
    if tokenizer is None and run.batches.rows.documents.tokenizer != "bytes":
        return Beside(_ids(None, origin), {}, {} if origin is None else _there(origin, _GENERATION))
    if tokenizer in (None, "bytes"):
        ids = _ids(0)
        texts = {"tokenizer.json": _of_bytes(), "tokenizer_config.json": _config(_END_OF_BYTES, seq)}
        return Beside(ids, texts | {_GENERATION: _generation(ids)}, {})
    file = tokenizers.file_of(tokenizer)
    loaded = tokenizers.load(file, run.options.end_token)
    same = origin is not None and file.resolve() == (origin / file.name).resolve()
    ids = _ids(loaded.end, origin if same else None)
    texts = {"tokenizer_config.json": _config(loaded.end_token, seq), _GENERATION: _generation(ids)}
    copied = {"tokenizer.json": file}
    if file.name == "tokenizer.json":
        copied |= _there(file.parent, *_OF_TOKENIZER)
    if same:
        copied |= _there(file.parent, _GENERATION)
    return Beside(ids, texts, copied)


def _ids(end: int | None, origin: Path | None = None) -> dict[str, Any]:
    """The ids of special tokens: those in the config.json of `origin`, else that of the end of a text."""
    fields = {} if origin is None else read_json(origin / CONFIG)
    return {name: fields.get(name) for name in _IDS} | {"eos_token_id": fields.get("eos_token_id", end)}


def _there(folder: Path, *names: str) -> dict[str, Path]:
    return {name: folder / name for name in names if (folder / name).is_file()}


def _generation(ids: Mapping[str, Any]) -> str:
    return _json({name: number for name, number in ids.items() if number is not None})


def _config(end: str | None, seq: int) -> str:
    found = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq}
    return _json(found | {"clean_up_tokenization_spaces": False} | ({} if end is None else {"eos_token": end}))


def _of_bytes() -> str:
    """A tokenizer.json whose tokens are the bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]  # these bytes stand for themselves in such a file
    others = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) for byte in printed} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    made = Tokenizer(models.BPE({_END_OF_BYTES if not byte else letters[byte]: byte for byte in range(256)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(_END_OF_BYTES, special=True, normalized=False)])
    return made.to_str()


def _json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
