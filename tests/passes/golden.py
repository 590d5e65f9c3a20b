"""Golden tests of passes on HLO text: run passes, FileCheck the output, execute both programs on the CPU.

A golden file (tests/testdata/<pass>/*.hlo) is an HLO module with `// CHECK` lines between its computations. The CHECK
lines follow the order of the output: callee before caller. Layouts are dropped from the output before the check.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser

from dhelix.passes.framework.manager import Pass, PassManager, Stage
from dhelix.passes.framework.report import PassReport
from dhelix.passes.hlo import HloModule, shapes
from dhelix.runtime.compiler.lowering import with_hlo

TESTDATA = Path(__file__).parent.parent / "testdata"
_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "s32": jnp.int32, "pred": jnp.bool_}


def files(folder: str) -> list[str]:
    """Golden files of a pass, for `pytest.mark.parametrize`."""
    return sorted(f"{folder}/{path.name}" for path in (TESTDATA / folder).glob("*.hlo"))


def read(name: str, edits: Mapping[str, str] | None = None) -> str:
    """Reads a golden file. `edits` replaces pieces of text, each of which must occur exactly once."""
    text = (TESTDATA / name).read_text()
    for old, new in (edits or {}).items():
        assert text.count(old) == 1, f"{name} holds {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    return text


def run(text: str, *passes: Pass) -> tuple[HloModule, HloModule, PassReport]:
    """Runs `passes`. Returns the module before and after (the same object if unchanged), and the last pass's report.

    Raises:
      DhelixError: a pass refuses.
    """
    before = HloModule.from_text(text)
    changed, report = PassManager(passes, strict=True).run(Stage.LOWERED, before.to_bytes())
    return before, before if changed is None else HloModule.from_bytes(changed), report.passes[-1]


def check(name: str, *passes: Pass, edits: Mapping[str, str] | None = None, prefix: str = "CHECK") -> PassReport:
    """Runs `passes` on a golden file, FileChecks the result, and compares the results of both programs."""
    before, after, report = run(read(name, edits), *passes)
    filecheck(printed(after), name, prefix)
    assert_same_results(before, after)
    return report


def printed(module: HloModule) -> str:
    """HLO text without layouts and without the comments that number tuple elements."""
    return re.sub(r"(?<=\])\{[\d,]*\}|/\*index=\d+\*/", "", module.to_text())


def filecheck(output: str, name: str, prefix: str = "CHECK") -> None:
    """Raises AssertionError with FileCheck's message and the whole output."""
    options = Options(match_filename=str(TESTDATA / name), check_prefixes=[prefix])
    matcher = Matcher(options, FInput(name, output), Parser.from_opts(options))
    matcher.stderr = io.StringIO()
    assert matcher.run() == 0, f"{matcher.stderr.getvalue()}\n{output}"


def assert_same_results(before: HloModule, after: HloModule) -> None:
    """Compares bit by bit. The inputs are small whole numbers, whose sums and products are exact in any order."""
    for old, new in zip(execute(before), execute(after), strict=True):
        np.testing.assert_array_equal(old, new)


def execute(module: HloModule) -> list[np.ndarray]:
    """Results of the entry computation, which must return a tuple, for small whole numbers."""
    draw = np.random.default_rng(0)
    arguments = [
        jnp.asarray(draw.integers(-3, 4, p.shape.dimensions), _dtype(p.shape)) for p in module.entry.parameters
    ]
    results = [(tuple(s.dimensions), _dtype(s)) for s in module.entry.root.shape.tuple_shapes]

    def same_signature(*arguments: jax.Array) -> Any:
        return [jnp.zeros(*result) for result in results]

    lowered = jax.jit(same_signature, keep_unused=True).lower(*arguments)
    return [np.asarray(r) for r in with_hlo(lowered, module.to_bytes()).compile()(*arguments)]


def _dtype(shape: Any) -> Any:
    return _DTYPES[shapes.type_name(shape)]
