"""Forms of collective matmuls as HLO text, for tests of the pass; JAX lowers nothing.

A form is again the collective and the products, in the order of a pattern. So the output shows what was spliced in and
how it is connected to the rest.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dhelix.errors import DhelixError
from dhelix.passes.communication.collective_matmul.pattern import Pattern, Placed
from dhelix.passes.communication.collective_matmul.splicing import prepare
from dhelix.passes.hlo import HloModule
from dhelix.profiles.collective_matmul.sites import Form

TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
SUM = "sum {{ a = {0}[] parameter(0)\n  b = {0}[] parameter(1)\n  ROOT c = {0}[] add(a, b) }}"


@dataclass(frozen=True)
class TextForms:
    """Chooses one form for all sites with at least `least_rows` rows.

    `refuse`: the reason given for every other form. `paired`: choose no form where two strands run.
    """

    form: Form = Form("ring")
    least_rows: int = 0
    refuse: str = ""
    paired: bool = False

    def choose(self, placed: Placed) -> Form:
        if self.paired and placed.co_executed:
            raise DhelixError("paired")
        return self.form if placed.pattern.site.rows >= self.least_rows else Form("monolithic")

    def program(self, pattern: Pattern, form: Form) -> HloModule:
        if self.refuse:
            raise DhelixError(self.refuse)
        return prepare(HloModule.from_text(program_text(pattern)))


@dataclass
class Seen:
    """Chooses no form, and records the patterns that it was asked about."""

    patterns: list[Pattern] = dataclasses.field(default_factory=list)

    def choose(self, placed: Placed) -> Form:
        self.patterns.append(placed.pattern)
        return Form("monolithic")

    def program(self, pattern: Pattern, form: Form) -> HloModule:
        raise AssertionError("the monolithic form is not asked for")


def program_text(pattern: Pattern) -> str:
    """A module for one device that computes the pattern with one collective."""
    kind, n = TYPES[pattern.site.dtype], pattern.site.axis_size
    gathers = pattern.site.kind == "all_gather_matmul"
    batch, all_rows = pattern.batch, pattern.site.rows // pattern.batch
    groups = f"channel_id=1, replica_groups={_groups(pattern.axis)}, use_global_device_ids=true"
    if gathers:
        lines = [
            _parameter("x", 0, kind, batch, all_rows // n, pattern.contractions[0]),
            f"g = {_shape(kind, batch, all_rows, pattern.contractions[0])} all-gather(x), dimensions={{1}}, {groups}",
        ]
        for number, columns in enumerate(pattern.columns):
            lines += _product(pattern, kind, "g", number, 1 + number, pattern.contractions[0], columns)
        results = [f"y{number}" for number in range(len(pattern.columns))] + ["g"] * pattern.gathered
        shapes = [_shape(kind, batch, all_rows, columns) for columns in pattern.columns]
        shapes += [_shape(kind, batch, all_rows, pattern.contractions[0])] * pattern.gathered
    else:
        lines, results, total = [], ["r"], ""
        for number, k in enumerate(pattern.contractions):
            lines.append(_parameter(f"x{number}", 2 * number, kind, batch, all_rows, k))
            lines += _product(pattern, kind, f"x{number}", number, 2 * number + 1, k, pattern.columns[0])
            if total:
                lines.append(
                    f"total{number} = {_shape(kind, batch, all_rows, pattern.columns[0])} add({total}, y{number})"
                )
            total = f"total{number}" if total else f"y{number}"
        scattered = pattern.site.kind == "matmul_reduce_scatter"
        shapes = [_shape(kind, batch, all_rows // n if scattered else all_rows, pattern.columns[0])]
        opcode = "reduce-scatter" if scattered else "all-reduce"
        dimensions = "dimensions={1}, " if scattered else ""
        lines.append(f"r = {shapes[0]} {opcode}({total}), {dimensions}to_apply=sum, {groups}")
    lines.append(f"ROOT t = ({', '.join(shapes)}) tuple({', '.join(results)})")
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule form, num_partitions={_devices(pattern)}\n{SUM.format(kind)}\nENTRY form {{\n{body}\n}}"


def _product(pattern: Pattern, kind: str, x: str, number: int, parameter: int, k: int, columns: int) -> list[str]:
    rows = pattern.site.rows // pattern.batch
    sizes = (columns, k) if pattern.transposed else (k, columns)
    return [
        _parameter(f"w{number}", parameter, kind, *sizes),
        f"y{number} = {_shape(kind, pattern.batch, rows, columns)} dot({x}, w{number}), lhs_contracting_dims={{2}}, "
        f"rhs_contracting_dims={{{int(pattern.transposed)}}}",
    ]


def _parameter(name: str, number: int, kind: str, *sizes: int) -> str:
    return f"{name} = {_shape(kind, *sizes)} parameter({number})"


def _shape(kind: str, *sizes: int) -> str:
    return f"{kind}[{','.join(map(str, sizes))}]"


def _devices(pattern: Pattern) -> int:
    outside, axis, inside = pattern.axis
    return outside * axis * inside


def _groups(sizes: tuple[int, int, int]) -> str:
    outside, axis, inside = sizes
    groups = [
        ",".join(str((o * axis + k) * inside + i) for k in range(axis)) for o in range(outside) for i in range(inside)
    ]
    return "{" + ",".join(f"{{{group}}}" for group in groups) + "}"
