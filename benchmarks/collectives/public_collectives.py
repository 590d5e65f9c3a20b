"""Checks `dhelix inspect`'s count of collectives in large public programs against an independent parse of their text.

    python benchmarks/collectives/public_collectives.py --repository OWNER/NAME@COMMIT --root CHECKOUT \\
        --out benchmarks/results/public_collectives.json PATH ...

The independent parse uses lines and regular expressions. It reads an instruction's kind, the bytes of its operands
(looked up by name), and its groups in every form that XLA prints. `dhelix inspect` uses XLA's parser and the serialized
module. Both give a list of (kind, bytes, groups), and the lists must be equal. With `--compile`, unoptimized programs
are first compiled for H200s that this machine does not have, and the compiled text is compared.

The results name the compared programs, their source, and the counts. The programs themselves are too large to keep.
"""

import argparse
import collections
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.extend.mlir import hlo_to_stablehlo
from jax.interpreters import mlir
from jaxlib import version

from dhelix.passes import jax_compat
from dhelix.passes.analysis.collectives import KINDS, find_collective
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.shardy_import import import_shardy
from dhelix.runtime.compiler import deviceless

type Counted = tuple[str, int, tuple[tuple[int, ...], ...]]
"""Kind, bytes and groups of a collective. All are sorted, except the (source, target) of a permute."""

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ((?:\([^=]*?\)|\w+\[[^ ]*\]\S*)) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_AXIS = re.compile(r"'(\w+)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")


def of_text(text: str) -> list[Counted]:
    """Collectives of an HLO text, parsed line by line."""
    counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", text.split("\n", 1)[0])
    devices = math.prod(map(int, counts)) if counts else 0
    types: dict[str, str] = {}
    found: list[Counted] = []
    for line in text.split("\n"):
        if line.endswith("{") and not line.startswith(" "):
            types = {}  # names are valid in one computation
        parsed = _INSTRUCTION.match(_COMMENT.sub("", line))
        if parsed is None:
            continue
        name, shape, opcode, rest = parsed.groups()
        types[name] = shape
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            arguments, attributes = _split(rest)
            operands = [_type(argument, types) for argument in arguments]
            found.append((kind, _moved(kind, operands, shape), _groups(kind, attributes, devices)))
    return sorted(found)


def of_module(module: HloModule) -> list[Counted]:
    """Collectives of a module as `dhelix inspect` finds them, each once."""
    wrapped = {c for k in module.computations for i in k.instructions if i.opcode in ("async-start", "fusion")
               for c in i.called}  # fmt: skip
    found: list[Counted] = []
    for computation in module.computations:
        for instruction in computation.instructions if computation not in wrapped else ():
            collective = find_collective(instruction)
            for part in () if collective is None else (collective, *collective.others):
                found.append((part.kind, part.size, _sorted(part.kind, part.groups)))
    return sorted(found)


def _split(rest: str) -> tuple[list[str], str]:
    """An instruction's arguments, split at commas outside of brackets, and the text after them."""
    depth, start, arguments = 0, 0, []
    for n, letter in enumerate(rest):
        if letter in "([{":
            depth += 1
        elif letter in ")]}" and depth:
            depth -= 1
        elif letter == "," and not depth:
            arguments.append(rest[start:n].strip())
            start = n + 1
        elif letter == ")":
            return [a for a in (*arguments, rest[start:n].strip()) if a], rest[n + 1 :]
    return arguments, ""


def _type(argument: str, types: dict[str, str]) -> str:
    """The type of an operand. Older texts print it; newer ones print only the name."""
    shape, _, name = argument.rpartition(" ")
    return shape or types[name.removeprefix("%")]


def _bytes(shape: str) -> int:
    total = 0
    for kind, dimensions in _ARRAY.findall(shape):
        digits = re.search(r"\d+", kind)
        bits = _BITS.get(kind, int(digits[0]) if digits else 0)
        sizes = [int(d.lstrip("<=")) for d in dimensions.split(",") if d]
        total += (math.prod(sizes) * bits + 7) // 8
    return total


def _moved(kind: str, operands: list[str], shape: str) -> int:
    given = sum(map(_bytes, operands))
    if kind != "all-gather":
        return _bytes(operands[0]) if kind == "ragged-all-to-all" else given
    whole = _bytes(shape)
    return whole - given if shape.startswith("((") or shape.count("[") == 2 * len(operands) else whole


def _groups(kind: str, attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    if kind == "collective-permute":
        listed = _listed(attributes.partition("source_target_pairs=")[2])
        return tuple(sorted(listed))
    written = attributes.partition("replica_groups=")[2]
    if written.startswith("["):
        groups = _iota(written)
    elif written.startswith("mesh"):
        groups = _mesh(written)
    else:
        groups = _listed(written) or ([tuple(range(devices))] if devices else [])
    return _sorted(kind, groups)


def _sorted(kind: str, groups: Any) -> tuple[tuple[int, ...], ...]:
    if kind == "collective-permute":
        return tuple(sorted(map(tuple, groups)))
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _listed(written: str) -> list[tuple[int, ...]]:
    outer = re.match(r"\{((?:\{[\d, ]*\},?)*)\}", written)
    return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d, ]+)\}", outer[1])] if outer else []


def _iota(written: str) -> list[tuple[int, ...]]:
    found = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", written)
    assert found is not None, written[:80]
    dimensions = [int(d) for d in found[3].split(",")]
    order = [int(d) for d in found[4].split(",")] if found[4] else range(len(dimensions))
    return list(itertools.batched(_transposed(list(range(math.prod(dimensions))), dimensions, order), int(found[2])))


def _mesh(written: str) -> list[tuple[int, ...]]:
    """Groups like `mesh['a'=2,'b'=4] {'b'}`: devices that differ only along b. `'b':(1)2` is b's major factor 2."""
    found = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(\[?([\d,]+)\]?\))? *\{([^}]*)\}", written)
    assert found is not None, written[:80]
    axes = {name: int(size) for name, size, *_ in _AXIS.findall(found[1])}
    wanted = {name: (int(before or 1), int(size or axes[name])) for name, _, before, size in _AXIS.findall(found[3])}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for device, index in enumerate(itertools.product(*map(range, axes.values()))):
        apart = []
        for (name, size), i in zip(axes.items(), index, strict=True):
            before, part = wanted.get(name, (1, 1))
            inner = size // (before * part)
            apart.append((i // (part * inner), i % inner))
        groups.setdefault(tuple(apart), []).append(device)
    ids = [int(d) for d in found[2].split(",")] if found[2] else None
    return [tuple(ids[d] if ids else d for d in group) for group in groups.values()]


def _transposed(values: list[int], dimensions: list[int], order: Any) -> Iterator[int]:
    for index in itertools.product(*(range(dimensions[axis]) for axis in order)):
        at = dict(zip(order, index, strict=True))
        place = 0
        for axis, size in enumerate(dimensions):
            place = place * size + at[axis]
        yield values[place]


def compare(name: str, text: str, module: HloModule) -> dict[str, Any]:
    """Compares both lists of collectives. Returns a row of the results. Raises SystemExit if the lists differ."""
    ours, theirs = of_module(module), of_text(text)
    if ours != theirs:
        mine, text_only = (collections.Counter(a) - collections.Counter(b) for a, b in ((ours, theirs), (theirs, ours)))
        raise SystemExit(f"{name}: inspect alone counts {list(mine)[:3]}, the text alone {list(text_only)[:3]}")
    kinds = collections.Counter(kind for kind, *_ in ours)
    return {
        "program": name,
        "instructions": module.instruction_count,
        "devices": math.prod(module.device_counts),
        "collectives": len(ours),
        "kinds": dict(sorted(kinds.items())),
        "bytes": sum(size for _, size, _ in ours),
        "groups": sorted({f"{len(groups)} x {max(map(len, groups), default=0)}" for _, _, groups in ours}),
    }


def compiled(text: str) -> str:
    """Compiles an unoptimized program with its shardings for H200s; returns the compiled text."""
    deviceless.prepare_environment()
    module = HloModule.from_text(text)
    devices = deviceless.topology("h200", f"1x1x{module.device_counts[1]}").devices
    with mlir.make_ir_context():
        program = mlir.ir.Module.parse(hlo_to_stablehlo(module.to_bytes()))
        import_shardy(program)
        return jax_compat.compiled_text(program, devices, deviceless.COMPILER_OPTIONS)


def module_text(file: str) -> str:
    """The HLO module in a file that also holds other text. An attribute that XLA's parser does not know is removed."""
    found = re.search(r"^HloModule .*^\}$", file, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit("no HLO module in the file")
    return found[0].replace(", api_version=API_VERSION_UNSPECIFIED", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", help="paths of HLO texts in the repository")
    parser.add_argument("--repository", required=True, help="where the programs come from, as OWNER/NAME@COMMIT")
    parser.add_argument("--root", type=Path, default=Path(), help="folder with the repository")
    parser.add_argument("--compile", action="store_true", help="compile them before they are compared")
    parser.add_argument("--out", type=Path, help="JSON file of results, to which these are added")
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.is_file() else []
    for program in arguments.programs:
        text = module_text((arguments.root / program).read_text())
        text = compiled(text) if arguments.compile else text
        row = {"repository": arguments.repository, **compare(program, text, HloModule.from_text(text))}
        row["text"] = f"compiled by jaxlib {version.__version__}" if arguments.compile else "as it stands there"
        print(json.dumps(row))
        rows.append(row)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
