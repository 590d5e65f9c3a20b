"""The files of a checkpoint: one `model.safetensors`, or several and an index that says which tensor is where.

    with Files(folder) as files:
        files.shape("lm_head.weight"), files.values("lm_head.weight", (slice(0, 8), slice(None)))

Files are memory-mapped, so that reading a part of a tensor does not read the rest of the file.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The types of tensors that become parameters."""


class WeightsError(ValueError):
    """A checkpoint cannot be read or written. The message names the file, the tensor or the field."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      WeightsError: there is no such file, or it holds something else.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        folder = "has no" if path.parent.is_dir() else "does not exist, so there is no"
        raise WeightsError(
            f"{path.parent} {folder} {path.name}; give the folder that save_pretrained wrote or that was downloaded"
        ) from None
    except (ValueError, OSError) as error:
        raise WeightsError(f"{path} cannot be read as JSON ({error}); copy the file again") from None
    if not isinstance(found, dict):
        raise WeightsError(f"{path} holds no JSON object; copy the file again")
    return found


class Files:
    """All tensors in the files of a folder. A context, which closes the files at its end.

    Raises:
      WeightsError: a file is missing or damaged, or the index names a tensor that its file lacks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        homes = _homes(folder)
        names = sorted(set(homes.values())) if homes else [SINGLE]
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise WeightsError(
                f"{folder} lacks {absent[0]} ({len(absent)} of {len(names)} files are missing); copy them from where "
                "the checkpoint came from"
            )
        self._opened = {name: _opened(folder / name) for name in names}
        self._homes = {tensor: name for name, file in self._opened.items() for tensor in file.keys()}
        if lost := [tensor for tensor, name in homes.items() if self._homes.get(tensor) != name]:
            raise WeightsError(
                f"{folder / homes[lost[0]]} lacks the tensor {lost[0]}, which {INDEX} has there; copy both files again"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._opened.values():
            file.__exit__(kind, error, trace)

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._homes)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The type of a tensor as NumPy names it.

        Raises:
          WeightsError: it is none of `TYPES`.
        """
        code = self._slice(name).get_dtype()
        if code not in TYPES:
            raise WeightsError(
                f"{self.folder / self._homes[name]}: the tensor {name} has type {code}, and dhelix reads "
                f"{', '.join(TYPES)}; save the checkpoint in one of these types"
            )
        return TYPES[code]

    def values(self, name: str, box: Sequence[slice]) -> np.ndarray:
        """A copy of a box of a tensor."""
        return self._slice(name)[tuple(box)]

    def _slice(self, name: str) -> Any:
        return self._opened[self._homes[name]].get_slice(name)


def _homes(folder: Path) -> dict[str, str]:
    """The name of each tensor's file, as the index says it. Without an index, nothing.

    Raises:
      WeightsError: there are neither safetensors nor an index, or the index is wrong.
    """
    if (folder / SINGLE).is_file():
        return {}
    if not (folder / INDEX).is_file():
        other = sorted(path.name for path in folder.glob("*.bin"))
        instead = f", but {other[0]}; save it with save_pretrained(safe_serialization=True)" if other else "; copy them"
        raise WeightsError(f"{folder} has neither {SINGLE} nor {INDEX}{instead}")
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise WeightsError(f"{folder / INDEX} has no weight_map; copy the file again")
    for tensor, name in found.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise WeightsError(f"{folder / INDEX}: {tensor} is in {name!r}, which is no file of this folder")
    return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "numpy").__enter__()
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is truncated or damaged ({error}); copy the file again") from None


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end. If there is an error, nothing is left of it.

    Raises:
      WeightsError: `folder` exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} exists already; give a new folder")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_files(
    folder: Path, sizes: Mapping[str, int], values: Callable[[str], np.ndarray], file_bytes: int = 5_000_000_000
) -> None:
    """Writes tensors into one file, or into several with an index. One file at a time is in memory.

    Args:
      sizes: the bytes of each tensor, by name.
      values: a tensor's values in one piece of memory.
      file_bytes: the most bytes of tensors in one file. A larger tensor has a file of its own.

    Raises:
      WeightsError: a file cannot be written.
    """
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + size > file_bytes:
            groups.append([])
        groups[-1].append(name)
    homes = {}
    for number, group in enumerate(groups, 1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        try:
            save_file({name: values(name) for name in group}, folder / file, {"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{folder.parent} cannot be written ({error}); free space, or give another") from None
        homes |= dict.fromkeys(group, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(homes.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
