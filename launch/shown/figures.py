"""What all pictures share: colours and words for them, short names of collectives, and functions that draw and save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dhelix.errors import DhelixError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In an SI block, alpha runs backward and beta forward. So ALPHA is also the colour of backward, and BETA of forward.
ALPHA, BETA = "#e08a3c", "#3f7cac"
ALPHA_LIGHT, BETA_LIGHT = "#f2c79b", "#a3c4de"
HIDDEN, EXPOSED = "#79b791", "#cf2e43"
INK, GREY, FAINT = "#24292f", "#6b737c", "#f1f3f5"
HIDDEN_WORDS, EXPOSED_WORDS, SLOW_DOWN_WORDS = "hidden communication", "exposed communication", "slow-down"

SHORT: Mapping[str, str] = MappingProxyType({
    "all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR", "all-to-all": "A2A",
    "ragged-all-to-all": "RA2A", "collective-permute": "CP", "collective-broadcast": "CB",
})  # fmt: skip

_NO_VERSION: Mapping[str, None] = MappingProxyType({"Software": None})


@contextlib.contextmanager
def drawing(style: Mapping[str, Any]) -> Iterator[type[Figure]]:
    """Gives matplotlib's class of figures, with the style of all pictures while they are drawn.

    Args:
      style: matplotlib's parameters, such as "font.size", beside those that all pictures share.

    Raises:
      DhelixError: matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise DhelixError("pictures need matplotlib: pip install 'dhelix[plot]'") from None
    shared: Any = {"font.family": "DejaVu Sans", "text.color": INK, **style}
    with matplotlib.rc_context(shared):
        yield Figure


def chart_metadata(path: str | Path) -> Mapping[str, str | None]:
    """The metadata for `save` that make equal charts equal files.

    Raises:
      DhelixError: the name of the file ends neither in .png nor in .svg.
    """
    ending = Path(path).suffix.lower()
    if ending not in (".png", ".svg"):
        raise DhelixError(f"{path}: charts are .png or .svg files; give such a name")
    return _NO_VERSION if ending == ".png" else {"Date": None, "Creator": None}


def save(
    figure: Figure, path: str | Path, a_file: str = "a .png", metadata: Mapping[str, str | None] = _NO_VERSION
) -> None:
    """Writes a figure to a file. Equal figures give equal bytes.

    Args:
      a_file: words for the kind of file, for the error message.
      metadata: metadata for matplotlib's `savefig`.

    Raises:
      DhelixError: the file cannot be written.
    """
    try:
        if Path(path).is_dir():
            raise IsADirectoryError("it is a folder")
        figure.savefig(path, metadata=dict(metadata))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DhelixError(f"cannot write {path} ({reason}); give {a_file} in a folder that exists") from None
