"""Python imports this module at its start, in processes that `dhelix run` or `dhelix launch` starts, and in children.

PYTHONPATH names its folder. DHELIX_AUTO says what to interleave (`dhelix/runtime/undecorated/policy.py`), DHELIX_LAUNCH
which job to join (`dhelix/runtime/launched/task.py`). A sitecustomize of the machine's own is imported afterwards, as
without dhelix.
"""

import os
import sys


def _start() -> None:
    if os.environ.get("DHELIX_LAUNCH"):
        try:
            from dhelix.runtime.launched import joining
        except ImportError as error:
            print(f"dhelix launch: this Python has no dhelix ({error}), so it joins no job", file=sys.stderr)
        else:
            joining.start()
    if os.environ.get("DHELIX_AUTO"):
        try:
            from dhelix.runtime.undecorated.start import when_jax_is_imported
        except ImportError as error:
            print(f"dhelix run: this Python has no dhelix ({error}), so nothing is interleaved", file=sys.stderr)
        else:
            when_jax_is_imported()


def _next() -> None:
    """Imports the sitecustomize that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    kept, own = list(sys.path), sys.modules.pop("sitecustomize", None)
    sys.path[:] = [path for path in kept if os.path.abspath(path or os.curdir) != here]
    try:
        import sitecustomize  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own
    finally:
        sys.path[:] = kept


_start()
_next()
