"""Reads a checkpoint of Hugging Face into parameters of dhelix, and writes parameters as such a checkpoint.

    config, params = read("Llama-3.1-8B")                                        one device, the types of the files
    write("tuned", config, params)                                               the same bytes, if nothing trained

    config = read_config("Llama-3.1-8B", remat="full")                           onto a mesh
    training = make_train_step(config, mesh, optimizer, microbatches)
    config, params = read("Llama-3.1-8B", "float32", training.state_shardings.params, config)

One of our arrays at a time is read, and each process reads only the parts that its devices hold.
"""

import dataclasses
import fnmatch
import functools
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.training import Params
from dhelix.models.families import family_of
from dhelix.models.huggingface.configs import CONFIG, architecture_in, fields_of, read_config
from dhelix.models.huggingface.files import TYPES, Files, WeightsError, new_folder, write_files
from dhelix.models.huggingface.layout import Piece, Tensor, leaves, part_of, shown, tensors, to_ours, to_theirs
from dhelix.models.huggingface.names import HEAD, NAMES, Names


def read(
    folder: str | Path,
    dtype: str | None = None,
    shardings: Params | None = None,
    config: DecoderConfig | None = None,
) -> tuple[Any, Params]:
    """The configuration and the parameters of a checkpoint of Llama, GPT-2, Mixtral or Phi-MoE.

    Args:
      folder: has config.json and safetensors in one or several files.
      dtype: type of the parameters. None: that of the files.
      shardings: a `jax.sharding.Sharding` for each parameter, in the tree of parameters. None: all are on one device.
      config: what `read_config` returned, with other choices for training. None: `read_config(folder)`.

    Returns:
      The configuration, whose `param_dtype` is that of the parameters; and the parameters in the order of the model,
      stacked if `config.scan_layers`.

    Raises:
      WeightsError: config.json, a file or a tensor is missing, damaged, superfluous or of another shape or type; or a
        feature is unknown. The message names it and says what to do.
    """
    folder = Path(folder)
    names, config = NAMES[architecture_in(folder)], read_config(folder) if config is None else config
    with Files(folder) as files:
        shapes = _shapes(config)
        found = _as_named(tensors(names, leaves(shapes)), names, files)
        _check(files, found, names, config.tie_embeddings)
        config = dataclasses.replace(config, param_dtype=dtype or _common_type(files, found))
        params = _load(files, found, shapes, jnp.dtype(config.param_dtype), shardings)
    return config, params


def write(
    folder: str | Path,
    config: DecoderConfig,
    params: Params,
    dtype: str | None = None,
    file_bytes: int = 5_000_000_000,
    ids: Mapping[str, Any] | None = None,
    finish: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes a checkpoint that transformers and `read` load: config.json, and safetensors in one or several files.

    The folder appears only when it is complete. Tokenizer and settings of generation are not our matter: copy them from
    where the model came from, or let `finish` write them.

    Args:
      folder: a new folder.
      params: in the order of the model. All of their parts are in this process.
      dtype: type of the tensors. None: that of the parameters.
      file_bytes: the most bytes of tensors in one file.

      file_bytes: see `write_files`.
      ids: further fields of config.json, which name special tokens: {"eos_token_id": 2}.
      finish: called with the folder before it appears; it may add files.

    Raises:
      WeightsError: the folder exists, transformers has no such model, or the parameters are not those of `config`, have
        several types, or lie partly in other processes.
    """
    folder, arrays = Path(folder).absolute(), leaves(params)
    expected = leaves(_shapes(config))
    _check_params(arrays, expected)
    kind = None if dtype is None else jnp.dtype(dtype)
    kinds = {str(kind or array.dtype) for array in arrays.values()}
    if len(kinds) > 1 or not kinds <= set(TYPES.values()):
        raise WeightsError(
            f"the parameters have type {' and '.join(sorted(kinds))}; give the type of all tensors, dtype='bfloat16' "
            "or another of float32 and float16"
        )
    architecture, fields = fields_of(dataclasses.replace(config, param_dtype=kinds.pop()))
    found = {tensor.name: tensor for tensor in tensors(NAMES[architecture], expected)}

    def values(name: str) -> np.ndarray:
        parts = [np.asarray(arrays[piece.path][piece.lead]) for piece in found[name].pieces]
        turned = to_theirs(found[name], parts)
        return turned if kind is None else turned.astype(kind)

    def size(tensor: Tensor) -> int:
        itemsize = (kind or arrays[tensor.pieces[0].path].dtype).itemsize
        return int(np.prod(tensor.shape)) * itemsize

    with new_folder(folder) as partial:
        write_files(partial, {name: size(tensor) for name, tensor in found.items()}, values, file_bytes)
        (partial / CONFIG).write_text(json.dumps({**fields, **(ids or {})}, indent=2, sort_keys=True) + "\n")
        finish(partial)


def _shapes(config: DecoderConfig) -> Params:
    return jax.eval_shape(lambda: family_of(config).init_params(config, jax.random.key(0)))


def _as_named(found: list[Tensor], names: Names, files: Files) -> list[Tensor]:
    """The tensors, without the prefix if no tensor of the files has it."""
    if any(name.startswith(names.prefix) for name in files.names):
        return found
    return [tensor._replace(name=tensor.name.removeprefix(names.prefix)) for tensor in found]


def _check(files: Files, expected: list[Tensor], names: Names, tied: bool) -> None:
    """Checks that the files have the tensors of the model, no others, and each in its shape.

    Raises:
      WeightsError: they do not.
    """
    shapes = {tensor.name: tensor.shape for tensor in expected}
    found = set(files.names)
    ignored = (*names.ignored, *([HEAD] if tied else []))
    if missing := [name for name in shapes if name not in found]:
        raise WeightsError(
            f"{files.folder} lacks the tensor {missing[0]}{_and_more(missing)}; {CONFIG} and the files must be of one "
            "checkpoint, so copy both again"
        )
    surplus = [name for name in sorted(found - set(shapes)) if not any(fnmatch.fnmatch(name, one) for one in ignored)]
    if surplus:
        raise WeightsError(
            f"{files.folder} has the tensor {surplus[0]}{_and_more(surplus)}, which the model of {CONFIG} does not "
            "have; use a checkpoint of this architecture without additions"
        )
    for name, shape in shapes.items():
        if files.shape(name) != shape:
            raise WeightsError(
                f"{files.folder}: the tensor {name} has shape {list(files.shape(name))}, but by {CONFIG} it is "
                f"{list(shape)}; both must be of one checkpoint, so copy both again"
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _common_type(files: Files, found: list[Tensor]) -> str:
    """The type of all tensors.

    Raises:
      WeightsError: they have several types.
    """
    kinds = {files.dtype(tensor.name): tensor.name for tensor in found}
    if len(kinds) > 1:
        (one, first), (other, second), *_ = kinds.items()
        raise WeightsError(
            f"{files.folder}: the tensor {first} is {one}, and {second} is {other}; give the type of all, dtype={one!r}"
        )
    return next(iter(kinds))


def _load(files: Files, found: list[Tensor], shapes: Params, dtype: Any, shardings: Params | None) -> Params:
    """All parameters, one array after the other."""
    homes: dict[Any, dict[tuple[int, ...], tuple[Tensor, Piece]]] = {}
    for tensor in found:
        files.dtype(tensor.name)  # an unknown type is an error before anything is read
        for piece in tensor.pieces:
            homes.setdefault(piece.path, {})[piece.lead] = (tensor, piece)
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(lambda _: one_device, shapes) if shardings is None else shardings
    if jax.tree.structure(placed) != jax.tree.structure(shapes):
        raise WeightsError(
            "the shardings are not a tree like the parameters; use those of a step of the same configuration, without "
            "a pipeline"
        )
    by_path = leaves(placed)
    arrays = {
        path: jax.make_array_from_callback(
            leaf.shape, by_path[path], _reader(files, homes[path], leaf.shape, dtype), dtype=dtype
        )
        for path, leaf in leaves(shapes).items()
    }
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays.values())


def _reader(
    files: Files, pieces: Mapping[tuple[int, ...], tuple[Tensor, Piece]], shape: tuple[int, ...], dtype: Any
) -> Callable[[Any], np.ndarray]:
    """The function that reads the elements `index` of one of our arrays. Devices that hold the same share one read."""

    @functools.cache
    def read_box(box: tuple[tuple[int, int], ...]) -> np.ndarray:
        leading = len(next(iter(pieces)))
        out = np.empty([stop - start for start, stop in box], dtype)
        inner = tuple(slice(start, stop) for start, stop in box[leading:])
        for numbers in itertools.product(*(range(start, stop) for start, stop in box[:leading])):
            tensor, piece = pieces[numbers]
            values = files.values(tensor.name, part_of(tensor, piece, inner))
            place = tuple(number - start for number, (start, _) in zip(numbers, box, strict=False))
            out[place] = to_ours(tensor, piece, inner, values)
        return out

    return lambda index: read_box(tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True)))


def _check_params(arrays: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
    """Checks that parameters are those of a configuration, and that this process has all of them.

    Raises:
      WeightsError: they are not, or it has not.
    """
    for path in sorted({*arrays, *expected}, key=shown):
        if path not in arrays or path not in expected:
            what = "lack" if path not in arrays else "have"
            raise WeightsError(
                f"the parameters {what} {shown(path)}, unlike the model of `config`; give their own configuration"
            )
        array, shape = arrays[path], expected[path].shape
        if tuple(array.shape) != shape:
            raise WeightsError(
                f"the parameter {shown(path)} has shape {list(array.shape)}, but by the configuration it is "
                f"{list(shape)}; write it with its own configuration"
            )
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise WeightsError(
                f"other processes hold parts of {shown(path)}; restore the checkpoint of the run in one process, and "
                "write from there"
            )
