"""Training from a checkpoint of Hugging Face, and writing one: `--init_from` and `--export`.

    config = configuration("Llama-3.1-8B", seq=4096)      the model, with float32 parameters
    load(run)                                             its weights, in place of random ones
    export(run, "my-model")                               config.json, safetensors, and the tokenizer

Parameters are float32 unless `--param_dtype` says otherwise, and layers compute in the type of the checkpoint. Exported
weights have the type that layers compute in. So what was read as bfloat16 is written as bfloat16, bit for bit if
nothing was trained. With pipelines and sharded states, every host reads only what its devices hold.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from dhelix.errors import DhelixError
from dhelix.launch.train.data import token_files
from dhelix.launch.train.loop import Run
from dhelix.launch.train.options import Options
from dhelix.launch.train.saved import exported_tokenizer
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.gpt.gpt_config import GptConfig

_LONGEST = 4096  # tokens of a row, if neither a flag nor a table of positions says how many


def configuration(folder: str, **given: Any) -> DecoderConfig:
    """The configuration of a checkpoint, for training.

    Args:
      given: fields of the configuration that flags set.

    Raises:
      DhelixError: the folder has no such checkpoint.
    """
    from dhelix.models.huggingface import configs

    try:
        found = configs.read_config(folder, **({"param_dtype": "float32"} | given))
    except ValueError as error:
        raise DhelixError(str(error)) from None
    if _learns_positions(found):
        rows = configs.read_config(folder).seq
        if found.seq != rows:
            raise DhelixError(f"{folder} has a table of {rows} positions, and rows are as long; leave --seq out")
    elif "seq" not in given and found.seq > _LONGEST:
        return dataclasses.replace(found, seq=_LONGEST)
    return found


def _learns_positions(config: DecoderConfig) -> bool:
    return isinstance(config, GptConfig) and config.positions == "learned"


def tokenizer_of(options: Options) -> str | None:
    """The tokenizer of a run: the given one, or that of the checkpoint it starts from; None: bytes.

    Raises:
      DhelixError: the run starts from a checkpoint without a tokenizer, and its data is text.
    """
    if options.tokenizer is not None or options.init_from is None:
        return options.tokenizer
    own = Path(options.init_from) / "tokenizer.json"
    if own.is_file():
        return str(own)
    if options.data is not None and token_files.is_one(Path(options.data)):
        return None
    raise DhelixError(f"{options.init_from} has no tokenizer.json; give --tokenizer a file, or bytes")


def load(run: Run) -> None:
    """Gives a new run the weights of the checkpoint that it starts from.

    Raises:
      DhelixError: the tensors are not those of the model, or a file is damaged.
    """
    from dhelix.models.huggingface import weights

    training, folder = run.training, str(run.options.init_from)
    state = training.to_model_order(run.state)
    shardings = jax.tree.map(lambda array: array.sharding, state.params)
    jax.tree.map(lambda array: array.delete(), (state.params, run.state.params))  # before the memory is needed again
    try:
        _, params = weights.read(folder, training.config.param_dtype, shardings, training.config)
    except ValueError as error:
        raise DhelixError(str(error)) from None
    run.state = training.from_checkpoint(dataclasses.replace(state, params=params))


def export(run: Run, folder: str) -> None:
    """Writes the parameters as a checkpoint of Hugging Face, and the tokenizer beside them. Process 0 writes.

    Raises:
      DhelixError: the folder exists or cannot be written, or transformers has no such model.
    """
    from dhelix.models.huggingface import configs, weights

    config, params = run.training.config, run.training.to_model_order(run.state).params
    if run.options.init_from is not None and not _learns_positions(config):  # rows may have been shorter in training
        config = dataclasses.replace(config, seq=max(config.seq, configs.read_config(run.options.init_from).seq))
    if jax.process_count() > 1:
        params = multihost_utils.process_allgather(params, tiled=True)
    if jax.process_index() > 0:
        return
    try:
        beside = exported_tokenizer.of(run, tokenizer_of(run.options), config.seq)
        weights.write(folder, config, params, config.dtype, ids=beside.ids, finish=beside.write)
    except (OSError, ValueError) as error:
        raise DhelixError(f"--export {folder}: {error}") from None
