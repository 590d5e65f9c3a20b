"""The stored checkpoints (`make_references.py`), and changed copies of them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

FOLDER = Path(__file__).parents[2] / "testdata" / "huggingface"


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors in the files of a folder."""
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


def assert_same_bytes(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    """The same names, types, shapes and bits."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape), name
        assert array.tobytes() == other[name].tobytes(), name


def copied(name: str, into: Path, tensors: Mapping[str, np.ndarray] | None = None, **fields: Any) -> Path:
    """A copy of a stored checkpoint in a new folder.

    Args:
      tensors: what the copy has in place of the stored tensors, in one file.
      fields: fields of config.json that are replaced. `...` removes a field.
    """
    folder = into / name
    shutil.copytree(FOLDER / name, folder)
    if tensors is not None:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | fields
    kept = {field: value for field, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder
