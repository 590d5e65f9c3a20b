"""Matplotlib's figures as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dhelix.errors import DhelixError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_VERSION: Mapping[str, None] = MappingProxyType({"Software": None})


def save(
    figure: Figure, path: str | Path, a_file: str = "a .png", metadata: Mapping[str, str | None] = _NO_VERSION
) -> None:
    """Writes a figure, the same bytes for the same picture.

    Raises DhelixError where that is not possible; it says to name `a_file`.
    """
    try:
        figure.savefig(path, metadata=dict(metadata))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DhelixError(f"cannot write {path} ({reason}); name {a_file} in a folder that exists") from None
