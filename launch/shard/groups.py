"""`dhelix shard --groups`: the groups of a model's parameters that the command knows.

    groups_of(task, config, ["embedding", "layers/*norm"])      # two groups, and one of all other parameters

A key is matched against the paths of the model's parameters, as the step that carries the plan out does it
(`runtime/sharding/parameter_groups.py`). `experts` stands for the weights of routed experts, and `output` for the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.families import family_of
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.passes.sharding.factors import Factor
from dhelix.passes.sharding.groups import OTHERS, ParameterGroup, part_of
from dhelix.passes.sharding.sharding_plan import check_group
from dhelix.passes.sharding.sizes import check_names
from dhelix.passes.sharding.step_times import Job
from dhelix.runtime.sharding.parameter_groups import group_numbers, paths_of

EXPERTS = "w_*"
"""The key of routed experts: w_gate, w_up and w_down, which are no other names where there are experts."""

_ATTENTION = ("wq", "wk", "wv", "wo")


def keys_of(given: Sequence[str], config: DecoderConfig) -> list[str]:
    """The keys of `--groups` as a plan has them. Raises DhelixError if one is none, or the model has no experts."""
    if "experts" in given and not isinstance(config, MoeConfig):
        raise DhelixError("--groups experts: this model has none; use embedding, head, layers, or a part of a path")
    for key in given:
        check_group(key)
    check_names(given)
    return [{"experts": EXPERTS, "output": "head"}.get(key, key) for key in given]


def notes_of(given: Sequence[str]) -> tuple[str, ...]:
    """A line about keys that a plan writes otherwise."""
    return (f"experts are the parameters {EXPERTS} (w_gate, w_up, w_down)",) if "experts" in given else ()


def groups_of(job: Job, mesh: Factor, config: DecoderConfig, keys: Sequence[str]) -> list[ParameterGroup]:
    """The groups of a model's parameters, the others last if there are any.

    Args:
      job: the whole model's, with the sizes that `job.model_sizes` makes.
      keys: as in a plan.

    Raises:
      ShardingError: a key matches no parameter, or only those of an earlier one.
    """
    init: Callable[..., Any] = family_of(config).init_params
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    paths, leaves = paths_of(shapes), jax.tree.leaves(shapes)
    numbers, sizes = group_numbers(keys, paths), job.sizes
    found = []
    for number, name in [*enumerate(keys), (None, OTHERS)]:
        modules, outside, matrices = [0, 0], [0, 0], list[tuple[int, ...]]()
        for path, leaf, own in zip(paths, leaves, numbers, strict=True):
            if own != number:
                continue
            first, *_, last = [*path.text.split("/"), path.text]
            if first == "layers":
                modules[last not in _ATTENTION] += math.prod(leaf.shape[1:])
                matrices.append(leaf.shape[1:])
            else:
                outside[first != "embedding"] += math.prod(leaf.shape)
        held = tuple(m for m in sizes.matrices if any(s[0] == m.rows and math.prod(s) == m.size for s in matrices))
        if sum(modules) or sum(outside):
            found.append(part_of(job, sizes.only(name, modules, outside, held), mesh))
    return found
