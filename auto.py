"""`import dhelix.auto`: from here on, steps of this process run as interleaved strands, whichever library jits them.

    import dhelix.auto                         # before the first step is compiled
    print(dhelix.auto.report())                # what was changed, and what was left alone and why

Options come from the environment variable DHELIX_AUTO, which `dhelix run` sets (docs/guide/run.md). `dhelix run` does
the same without a line in the program.
"""

from dhelix.runtime.undecorated import start
from dhelix.runtime.undecorated.catch import report

__all__ = ["report"]

start.now()
