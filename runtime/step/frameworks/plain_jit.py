"""How a step without a front is jitted: by `jax.jit`, unless the user has done so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dhelix.passes import jax_compat


class PlainJit:
    """Jits the user's function, and functions that return its results."""

    def __call__(self, function: Callable[..., Any], **options: Any) -> Any:
        function = getattr(function, "jitted_fn", function)  # unwraps nnx.jit, to find its static arguments
        return function if jax_compat.is_jitted(function) else jax.jit(function, **options)

    def results(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return jax.jit(function, **options)


PLAIN = PlainJit()
