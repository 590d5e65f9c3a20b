"""Presets of all models, by name. This module does not import JAX, because the flags of commands need the names."""

import dataclasses
from types import MappingProxyType
from typing import Any

from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.gpt.gpt_config import GPT_PRESETS
from dhelix.models.llama.llama_config import LLAMA_PRESETS
from dhelix.models.moe.moe_config import MOE_PRESETS

PRESETS: MappingProxyType[str, DecoderConfig] = MappingProxyType({**LLAMA_PRESETS, **MOE_PRESETS, **GPT_PRESETS})


def preset(name: str, layers: int | None = None, **overrides: Any) -> DecoderConfig:
    """The preset `name`, with its number of layers or any other field of its configuration replaced.

    Raises:
      ValueError: the preset or a field is unknown.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; use one of {', '.join(PRESETS)}")
    found = PRESETS[name]
    unknown = sorted(set(overrides) - {field.name for field in dataclasses.fields(found)})
    if unknown:
        raise ValueError(f"{type(found).__name__} has no field {unknown[0]!r}; override one of its fields")
    if layers is not None:
        overrides["layers"] = layers
    return dataclasses.replace(found, **overrides)
