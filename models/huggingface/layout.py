"""Where each tensor of a checkpoint lies in our arrays, and how its values become ours.

    ours     layers/wq  [L, hidden, heads, head_dim]       layers/w_gate  [L, E, hidden, ffn]
    theirs   L tensors  [heads * head_dim, hidden]         L * E tensors  [ffn, hidden]

A *piece* is the part of our array that belongs to one layer and one expert. As a matrix it has `rows` of its leading
dimensions as rows, and all others as columns. A tensor is this matrix, its transpose, or several pieces side by side.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dhelix.models.huggingface.names import Names, Rule

Path = tuple[str | int, ...]
"""Where an array is in the tree of parameters: names of dicts and numbers of lists."""


class Piece(NamedTuple):
    """A part of one of our arrays that lies in a tensor.

    Attributes:
      path: of the array.
      lead: the numbers of layer and expert, as far as the array has dimensions for them.
      shape: of the other dimensions.
      rows: how many of these dimensions are rows of the matrix.
      start: the first column in the tensor.
    """

    path: Path
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    rows: int
    start: int

    @property
    def matrix(self) -> tuple[int, int]:
        return math.prod(self.shape[: self.rows]), math.prod(self.shape[self.rows :])


class Tensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
      name: in the files.
      shape: in the files.
      transposed: whether it is the transpose of our matrix.
      pieces: what it holds, from the left to the right.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    pieces: tuple[Piece, ...]


def leaves(params: Any) -> dict[Path, Any]:
    """The arrays of a tree of parameters by their paths."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(_key(key) for key in path): leaf for path, leaf in found}


def _key(key: Any) -> str | int:
    return key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key


def shown(path: Path) -> str:
    return "/".join(map(str, path))


def tensors(names: Names, shapes: Mapping[Path, Any]) -> list[Tensor]:
    """All tensors of a model.

    Args:
      shapes: our arrays or their shapes, by path.

    Raises:
      ValueError: one of our arrays has no name there.
    """
    found = [tensor for rule in names.rules for tensor in _of_rule(rule, shapes)]
    named = {piece.path for tensor in found for piece in tensor.pieces}
    if nameless := [path for path in shapes if path not in named]:
        raise ValueError(f"{shown(nameless[0])} has no name in this architecture; add a rule to huggingface.names")
    return found


def _of_rule(rule: Rule, shapes: Mapping[Path, Any]) -> Iterator[Tensor]:
    for layer, prefix, lead in _places(rule, shapes):
        paths = [(*prefix, leaf) for leaf in rule.leaves]
        if paths[0] not in shapes:
            continue
        experts = range(shapes[paths[0]].shape[len(lead)]) if rule.of_experts else (None,)
        for expert in experts:
            numbers = lead if expert is None else (*lead, expert)
            pieces, start = [], 0
            for path in paths:
                pieces.append(Piece(path, numbers, tuple(shapes[path].shape[len(numbers) :]), rule.rows, start))
                start += pieces[-1].matrix[1]
            shape = (start,) if rule.kind == "vector" else (pieces[0].matrix[0], start)
            transposed = rule.kind == "linear"
            name = rule.name.format(layer=layer, expert=expert)
            yield Tensor(name, shape[::-1] if transposed else shape, transposed, tuple(pieces))


def _places(rule: Rule, shapes: Mapping[Path, Any]) -> Iterator[tuple[int, Path, tuple[int, ...]]]:
    """Each layer's number, the path of its arrays, and its index in them. An array at the ends counts as one layer."""
    if not rule.in_layers:
        yield 0, (), ()
        return
    inside = [path for path in shapes if path[0] == "layers"]
    if len(inside[0]) == 2:
        for layer in range(shapes[inside[0]].shape[0]):
            yield layer, ("layers",), (layer,)
    else:
        for layer in sorted({int(path[1]) for path in inside}):
            yield layer, ("layers", layer), ()


def part_of(tensor: Tensor, piece: Piece, index: Sequence[slice]) -> tuple[slice, ...]:
    """The smallest box of `tensor` that has all elements `index` of `piece`. A slice per dimension of the tensor."""
    columns = _range(piece.shape[piece.rows :], index[piece.rows :])
    columns = slice(piece.start + columns.start, piece.start + columns.stop)
    if len(tensor.shape) == 1:
        return (columns,)
    rows = _range(piece.shape[: piece.rows], index[: piece.rows])
    return (columns, rows) if tensor.transposed else (rows, columns)


def _range(shape: Sequence[int], index: Sequence[slice]) -> slice:
    """What a slice of the first dimension is when all dimensions are one."""
    inner, (start, stop, _) = math.prod(shape[1:]), index[0].indices(shape[0])
    return slice(start * inner, stop * inner)


def to_ours(tensor: Tensor, piece: Piece, index: Sequence[slice], values: np.ndarray) -> np.ndarray:
    """The elements `index` of `piece`, from the values of the box `part_of(tensor, piece, index)`."""
    values = values.T if tensor.transposed else values
    shape = list(piece.shape)
    firsts = {0, piece.rows}  # the box is already narrow in the first dimension of rows and of columns
    for n in firsts:
        start, stop, _ = index[n].indices(shape[n])
        shape[n] = stop - start
    rest = tuple(slice(None) if n in firsts else part for n, part in enumerate(index))
    return values.reshape(shape)[rest]


def to_theirs(tensor: Tensor, pieces: Sequence[np.ndarray]) -> np.ndarray:
    """The values of `tensor` in one piece of memory, from those of `tensor.pieces`."""
    if len(tensor.shape) == 1:
        flat = [values.reshape(-1) for values in pieces]
    else:
        flat = [values.reshape(piece.matrix) for piece, values in zip(tensor.pieces, pieces, strict=True)]
    joined = np.concatenate(flat, axis=-1) if len(flat) > 1 else flat[0]
    return np.ascontiguousarray(joined.T if tensor.transposed else joined)
