"""A few tokens of a trained model to look at: `--generate TEXT`.

    generate(run, tokenizer, "def main(", 32)     Generated("def main(", "argv=None):\n    parser = ...", 32, False)

Each token is the result of a whole forward pass over a window of `seq` tokens. XLA splits it over the devices as the
parameters are split. This is slow and simple; `models/llama/inference.py` has a cache of keys and values.
"""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dhelix.errors import DhelixError
from dhelix.launch.train.data.tokenizers import Tokenizer
from dhelix.launch.train.loop import Run
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.parallel import SINGLE_DEVICE
from dhelix.models.families import family_of
from dhelix.models.moe.moe_config import MoeConfig


@dataclasses.dataclass(frozen=True)
class Generated:
    """What a model has added to a text.

    Attributes:
      prompt: the text.
      text: what the model added.
      tokens: how many tokens it added.
      ended: whether the model then ended the document.
    """

    prompt: str
    text: str
    tokens: int
    ended: bool

    def __str__(self) -> str:
        """Lines for people. A bar before each line shows where blank lines and spaces of the model are.

        Control characters, which a terminal would obey, are shown as Python writes them.
        """
        count = f"{self.tokens} token{'s' * (self.tokens != 1)}"
        lines = [f"prompt: {json.dumps(self.prompt, ensure_ascii=False)}"]
        lines.append(f"the model adds {count}{' and ends the document' if self.ended else ''}:")
        return "\n".join(lines + [f"| {_shown(line)}" for line in self.text.split("\n")])


def _shown(line: str) -> str:
    return "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c != "\t" else c for c in line)


def generate(run: Run, tokenizer: Tokenizer, text: str, tokens: int, temperature: float = 0.0) -> Generated:
    """What the model adds to the text. It ends with the end of a document or of a row.

    Args:
      tokens: the most tokens to add.
      temperature: 0 takes the likeliest token; else tokens are drawn, with the seed of the run.

    Raises:
      DhelixError: the text is empty, or does not fit into a row.
    """
    config = _whole(run.training.config)
    prompt = prompt_of(tokenizer, text, config.seq)
    row = np.zeros((1, config.seq), np.int32)
    row[0, : len(prompt)] = prompt
    params = run.training.to_model_order(run.state).params
    following = jax.jit(partial(_next, config, temperature))
    added, ended = list[int](), False
    for place in range(len(prompt), min(len(prompt) + tokens, config.seq)):
        token = int(following(params, row, place, jax.random.key(run.options.seed + place)))
        ended = token == tokenizer.end
        if ended:
            break
        row[0, place] = token
        added.append(token)
    return Generated(text, _decoded(tokenizer, prompt.tolist(), added), len(added), ended)


def prompt_of(tokenizer: Tokenizer, text: str, seq: int) -> np.ndarray:
    """The tokens of the text. Raises DhelixError if there are none, or if they leave no room in a row."""
    (prompt,) = tokenizer.encode([text.encode()])
    if not 1 <= len(prompt) < seq:
        raise DhelixError(f"--generate: {len(prompt)} tokens of text; give 1 or more, fewer than --seq {seq}")
    return prompt


def _decoded(tokenizer: Tokenizer, prompt: list[int], added: list[int]) -> str:
    """The text of the added tokens. It is cut off the whole text, because some tokenizers drop a text's first space."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *added])
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(added)


def _whole(config: DecoderConfig) -> DecoderConfig:
    """The configuration in which experts drop no token, and attention is XLA's, which can be partitioned."""
    if isinstance(config, MoeConfig):
        config = dataclasses.replace(config, capacity_factor=config.experts / config.chosen)
    return dataclasses.replace(config, attention="xla")


def _next(
    config: DecoderConfig, temperature: float, params: Any, row: jax.Array, place: jax.Array, key: jax.Array
) -> jax.Array:
    """The token at `place`, from the logits of the token before it."""
    family: Any = family_of(config)
    found = family.logits(config, family.trainable(config, params, SINGLE_DEVICE), row, SINGLE_DEVICE)
    logits = (found[0] if isinstance(found, tuple) else found)[0, place - 1].astype(jnp.float32)
    return jax.random.categorical(key, logits / temperature) if temperature else jnp.argmax(logits)
