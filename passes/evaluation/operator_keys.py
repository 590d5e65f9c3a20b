"""Maps an instruction of a scheduled GPU program to its profile key: the facts that decide the instruction's time.

    custom-call (__cublas$lt$matmul)       gemm bf16,bf16->bf16:nt:cublaslt 8192x4096x1536
    custom-call (__cudnn$fmhaSoftmax)      attention bf16:causal:bsnh:cudnn 1x8x2x8192x8192x128
    fusion                                 fusion loop-multiply:1f0c33a57e 29360128
    copy                                   copy contiguous 16777216
    all-gather-start                       all-gather 67108864B 4x1 groups=1 nccl

A key depends on sizes, types, layouts, epilogues and the library. It does not depend on names, ids, metadata or the
algorithm that autotuning chose. If XLA fuses a library call with the slices that the call reads and writes, the fusion
has the key of the call, because the slices are only pointer offsets. The key of another fusion names the fusion's form
(`fusion_form`). So the key does not change with the number of layers. Control flow and instructions that take no time
have no key.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from dhelix.passes.analysis.collectives import Collective, exclusive_kernel, find_collective, is_done
from dhelix.passes.analysis.configuration import backend_config
from dhelix.passes.analysis.content import Contents
from dhelix.passes.evaluation.custom_calls import family_of
from dhelix.passes.evaluation.fusion_form import form_of, in_memory
from dhelix.passes.evaluation.operator_work import payload, work_of
from dhelix.passes.evaluation.transfers import SENDS, find_transfer
from dhelix.passes.hlo import Instruction, shapes
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey

FREE_OPCODES = frozenset(
    """parameter constant get-tuple-element tuple bitcast after-all opt-barrier add-dependency
    partition-id replica-id domain async-update""".split()
)
_KINDS = {
    "product": "gemm",
    "convolution": "gemm",
    "attention": "attention",
    "attention backward": "attention-backward",
}
"""The kind of a custom call's key, by the work of the call's family. Other custom calls have the kind "other"."""
_LIBRARIES = {"__cublas$gemm": "cublas", "__cublas$lt$matmul": "cublaslt", "__cublas$lt$groupedMatmul": "cublaslt"}


class OperatorKeys(dict[Instruction, Key | None]):
    """Maps instructions to keys, each made at its first lookup. Arguments: see `key_of`.

    Attributes:
      contents: of the instructions. Fusions with equal content get one key, which is made once.
    """

    def __init__(self, gpus_per_node: int = 8, implementation: str = "nccl") -> None:
        super().__init__()
        self.gpus_per_node, self.implementation = gpus_per_node, implementation
        self.contents = Contents()
        self._of_fusions: dict[Hashable, Key | None] = {}

    def __missing__(self, instruction: Instruction) -> Key | None:
        of = partial(key_of, gpus_per_node=self.gpus_per_node, implementation=self.implementation)
        key = self[instruction] = self.contents.once(instruction, self._of_fusions, of)
        return key


def key_of(instruction: Instruction, gpus_per_node: int = 8, implementation: str = "nccl") -> Key | None:
    """The profile key of `instruction`.

    The result is None if the instruction takes no time of its own, or is a message or host transfer (`transfers`). It
    is also None for a kernel that waits for its peers, because such a kernel cannot be measured alone.

    Args:
      gpus_per_node: number of devices per node; devices 0 .. n-1 are node 0, and so on.
      implementation: how collectives run, except XLA's own kernels; one of `keys.IMPLEMENTATIONS`.
    """
    opcode = instruction.opcode
    if opcode in FREE_OPCODES or opcode in CONTROL_FLOW or is_done(instruction) or exclusive_kernel(instruction):
        return None
    collective = find_collective(instruction)
    if collective is not None:
        return collective_key(collective, gpus_per_node, "triton" if _is_triton(instruction) else implementation)
    if opcode in SENDS or find_transfer(instruction) is not None:
        return None
    if opcode == "async-start":
        return key_of(instruction.called[0].root, gpus_per_node, implementation)
    kind, family, sizes = _identity(instruction)
    work = work_of(instruction)
    return OperatorKey(kind, family, sizes, work.flops, work.bytes)


def collective_key(collective: Collective, gpus_per_node: int, implementation: str) -> CollectiveKey:
    """The profile key of a collective. Without groups, it counts as a collective over all GPUs of one node."""
    groups = collective.groups
    if collective.kind == "collective-permute":
        groups = _connected(groups)
    nodes = max((len({d // gpus_per_node for d in group}) for group in groups), default=1)
    size = max(map(len, groups), default=gpus_per_node)
    return CollectiveKey(
        collective.kind, collective.size, -(-size // nodes), nodes, max(len(groups), 1), implementation
    )


def _is_triton(collective: Instruction) -> bool:
    """Whether XLA runs a collective as a Triton kernel instead of NCCL's. XLA does this for small all-reduces."""
    inside = collective.called[0].root if collective.opcode == "async-start" else collective
    return "triton" in backend_config(inside).get("fusion_backend_config", {}).get("kind", "")


def _connected(pairs: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that the pairs of a collective-permute connect. A ring is one group of all its devices."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = set(pair).union(*(g for g in groups if not g.isdisjoint(pair)))
        groups = [*(g for g in groups if g.isdisjoint(pair)), joined]
    return tuple(tuple(sorted(g)) for g in groups)


class _Identity(NamedTuple):
    kind: str
    family: str
    sizes: tuple[int, ...]


def _identity(instruction: Instruction) -> _Identity:
    opcode = instruction.opcode
    if opcode == "custom-call":
        return _call(instruction)
    if opcode in ("copy", "copy-start"):
        return _copy(instruction)
    if opcode == "dot":
        return _product(instruction, instruction.proto.dot_dimension_numbers, "hlo")
    if opcode != "fusion":
        form = form_of(instruction)
        return _Identity("other", f"{opcode}:{form.digest}", form.sizes)
    inside = payload(instruction.called[0])
    if inside is not None and inside.opcode == "custom-call":
        return _call(inside)
    if inside is not None and inside.opcode == "dot" and instruction.proto.fusion_kind == "kCustom":
        return _fused_product(instruction, inside)
    form = form_of(instruction)
    return _Identity("fusion", f"{_emitter(instruction)}-{form.label}:{form.digest}", form.sizes)


def _emitter(fusion: Instruction) -> str:
    """The part of XLA that makes the kernel: `loop`, `input` (reductions, transposes), `triton`, `cudnn`, `custom`."""
    kind = backend_config(fusion).get("fusion_backend_config", {}).get("kind", "")
    if kind:
        return "cudnn" if "cudnn" in kind else "triton" if "triton" in kind else "custom"
    return fusion.proto.fusion_kind.removeprefix("k").lower() or "loop"


def _fused_product(fusion: Instruction, dot: Instruction) -> _Identity:
    """Identity of a GEMM fusion. Other operations fused with the product count by their form."""
    product = _product(dot, dot.proto.dot_dimension_numbers, _emitter(fusion))
    form = form_of(fusion)
    if form.opcodes <= {"parameter", "dot", "bitcast"}:
        return product
    return product._replace(family=f"{product.family}:{form.result}-{form.digest}")


def _call(call: Instruction) -> _Identity:
    target, config = call.proto.custom_call_target, backend_config(call)
    if "cudnn_fmha_backend_config" in config:
        return _attention(call, config["cudnn_fmha_backend_config"])
    if gemm := config.get("gemm_backend_config"):
        return _gemm(call, gemm)
    if grouped := config.get("grouped_gemm_backend_config"):
        return _grouped_gemm(call, grouped["gemm_backend_config"])
    form, kind = form_of(call), _KINDS.get(family_of(call).work, "other")
    config_digest = blake2b(call.proto.backend_config, digest_size=4).hexdigest()
    family = f"{'_'.join(target.split())}:{form.digest}:{config_digest}"
    return _Identity(
        kind, family if kind == "other" else f"{shapes.type_name(call.operands[0].shape)}:{family}", form.sizes
    )


def _gemm(call: Instruction, config: dict[str, Any]) -> _Identity:
    target = call.proto.custom_call_target
    library = _LIBRARIES.get(target) or f"cublaslt-{target.rpartition('$')[2]}"
    product = _product(call, _DotNumbers.of(config["dot_dimension_numbers"]), library)
    return product._replace(family=":".join([product.family, *_gemm_options(config)]))


def _gemm_options(config: dict[str, Any]) -> list[str]:
    options = ["accumulate"] if config.get("beta") else []
    if config.get("epilogue", "DEFAULT") != "DEFAULT":
        options.append(config["epilogue"].lower())
    precision = config.get("precision_config", {})
    wanted = {*precision.get("operand_precision", ()), precision.get("algorithm", "ALG_UNSET")}
    return options + sorted(p.lower() for p in wanted - {"DEFAULT", "ALG_UNSET"})


class _DotNumbers(NamedTuple):
    """DotDimensionNumbers from a backend configuration, which writes them as JSON with numbers as strings."""

    lhs_contracting_dimensions: Sequence[int]
    rhs_contracting_dimensions: Sequence[int]
    lhs_batch_dimensions: Sequence[int]
    rhs_batch_dimensions: Sequence[int]

    @classmethod
    def of(cls, config: dict[str, Any]) -> "_DotNumbers":
        return cls(*([int(d) for d in config.get(name, ())] for name in cls._fields))


def _product(product: Instruction, numbers: Any, library: str) -> _Identity:
    """Identity of a product: `types:layout:library`, and sizes M, N, K, batch.

    The layout has a letter for each operand: `n` if the operand is row-major (M x K, K x N), `t` if it is transposed in
    memory. A `b` precedes the letters of a batched product. A result that is transposed in memory counts as the
    product of the transposed operands in reverse order.
    """
    lhs, rhs, out = product.operands[0].shape, product.operands[1].shape, shapes.first(product.shape)
    left = _letters(lhs, numbers.lhs_batch_dimensions, numbers.lhs_contracting_dimensions, "m")
    right = _letters(rhs, numbers.rhs_batch_dimensions, numbers.rhs_contracting_dimensions, "n")
    batch = [lhs.dimensions[d] for d in numbers.lhs_batch_dimensions]
    rows, columns = left.count("m"), right.count("n")
    result = "b" * len(batch) + "m" * rows + "n" * columns
    sizes = [_size(lhs, left, "m"), _size(rhs, right, "n"), _size(lhs, left, "k")]
    orders = [_in_memory(lhs, left), _in_memory(rhs, right), _in_memory(out, result)]
    types = [shapes.type_name(lhs), shapes.type_name(rhs)]
    if "nm" in orders[2]:
        swapped = str.maketrans("mn", "nm")
        orders = [orders[n].translate(swapped) for n in (1, 0, 2)]
        sizes[:2], types = sizes[1::-1], types[::-1]
    batched = prod(batch) > 1
    names = _transposed(orders[0], "km"), _transposed(orders[1], "nk")
    layout = "b" * batched + "".join(names) if all(names) and _plain(orders[2]) else ",".join(orders)
    family = f"{','.join(types)}->{shapes.type_name(out)}:{layout}:{library}"
    return _Identity("gemm", family, (*sizes, *([prod(batch)] if batched else [])))


def _letters(shape: Any, batch: Sequence[int], contracted: Sequence[int], other: str) -> str:
    """A letter for each dimension of an operand: `b` for batch, `k` for contracted, else `other`."""
    return "".join("b" if d in batch else "k" if d in contracted else other for d in range(len(shape.dimensions)))


def _size(shape: Any, letters: str, letter: str) -> int:
    return prod(size for size, found in zip(shape.dimensions, letters, strict=True) if found == letter)


def _in_memory(shape: Any, letters: str) -> str:
    """Letters from the slowest to the fastest dimension. Equal neighbours are merged, dimensions of size 1 dropped."""
    return "".join(letter for letter, _ in groupby(letters[d] for d in in_memory(shape)[1]))


def _transposed(order: str, transposed: str) -> str:
    """`t` if the matrix is transposed, else `n`; empty if `order` is not a matrix after leading batch dimensions."""
    matrix = order.removeprefix("b")
    return "" if "b" in matrix or len(matrix) > 2 else "t" if matrix == transposed else "n"


def _plain(order: str) -> bool:
    return order.removeprefix("b") in ("mn", "m", "n", "")


def _grouped_gemm(call: Instruction, config: dict[str, Any]) -> _Identity:
    """Identity of a grouped product. The sizes are M, N, K of all groups together, and the number of groups.

    With `ragged-k`, the groups divide the contracted rows. With `ragged-m`, they divide the rows of the result.
    """
    lhs, rhs, out = call.operands[0].shape, call.operands[1].shape, shapes.first(call.shape)
    numbers = _DotNumbers.of(config["dot_dimension_numbers"])
    depth = prod(lhs.dimensions[d] for d in numbers.lhs_contracting_dimensions)
    groups = shapes.element_count(call.operands[2].shape) if len(call.operands) > 2 else 1
    ragged = "k" if len(out.dimensions) > len(lhs.dimensions) else "m"
    rows = shapes.element_count(lhs) // depth
    columns = shapes.element_count(out) // (rows * (groups if ragged == "k" else 1))
    types = ",".join(shapes.type_name(s) for s in (lhs, rhs)) + "->" + shapes.type_name(out)
    orders = ",".join("".join(map(str, in_memory(s)[1])) for s in (lhs, rhs, out))
    family = ":".join([types, f"ragged-{ragged}", orders, "cublaslt", *_gemm_options(config)])
    return _Identity("grouped-gemm", family, (rows, columns, depth, groups))


def _attention(call: Instruction, config: dict[str, Any]) -> _Identity:
    """Identity of an attention call: `type:mask:layout[:options]:cudnn`, and sizes.

    The sizes are batch, heads, key heads, queries, keys, head size and, if there is one, window.
    """
    target = call.proto.custom_call_target
    query, key = call.operands[0].shape, call.operands[1].shape
    batch, heads, queries, keys = (int(d) for d in config["intermediate_tensor_shape"]["dimensions"])
    head_size = shapes.element_count(query) // (batch * heads * queries)
    key_heads = shapes.element_count(key) // (batch * keys * head_size)
    options = [name.lower() for name in ("Bias", "Dropout", "F8") if name in target]
    sizes = [batch, heads, key_heads, queries, keys, head_size]
    if window := int(config.get("sliding_window_length", 0)):
        options, sizes = [*options, "window"], [*sizes, window]
    if int(config.get("max_seg_per_batch", 1)) > 1:
        options.append("packed")
    mask = config.get("mask_type", "NO_MASK").lower()
    family = ":".join([shapes.type_name(query), mask, _attention_layout(key, config), *options, "cudnn"])
    return _Identity("attention-backward" if "Backward" in target else "attention", family, tuple(sizes))


def _attention_layout(key: Any, config: dict[str, Any]) -> str:
    """Letters of the keys' dimensions, slowest first: b for batch, s for sequence, n for heads, h for head size."""
    forward = "bmm1_dot_dimension_numbers" in config
    numbers = config.get("bmm1_dot_dimension_numbers" if forward else "bmm1_grad_gemm2_dot_dimension_numbers")
    if not numbers or len(key.dimensions) != 4:
        return "unknown"
    numbers = _DotNumbers.of(numbers)
    found = dict(zip(numbers.rhs_batch_dimensions, "bn", strict=True))
    found[numbers.rhs_contracting_dimensions[0]] = "h" if forward else "s"
    letters = "".join(found.get(d, "s" if forward else "h") for d in range(4))
    layout = key.layout.minor_to_major or range(3, -1, -1)
    return "".join(letters[d] for d in reversed(layout))


def _copy(copy: Instruction) -> _Identity:
    """Identity of a copy. The size of a contiguous copy is its bytes.

    Otherwise, the family says how the copy permutes dimensions. Dimensions that stay together count as one.
    """
    source, result = copy.operands[0].shape, shapes.first(copy.shape)
    host = ["host"] if copy.opcode == "copy-start" else []
    dims, here = in_memory(source)
    places = [here[d] for d in in_memory(result)[1]]  # place in the source of each dimension of the result
    if places == sorted(places):
        return _Identity("copy", ":".join([*host, "contiguous"]), (shapes.byte_size(source),))
    starts = [n for n, place in enumerate(places) if n == 0 or place != places[n - 1] + 1]
    runs = {places[a]: places[a:b] for a, b in zip(starts, [*starts[1:], len(places)], strict=True)}
    rank = {place: n for n, place in enumerate(sorted(runs))}
    sizes = tuple(prod(dims[p] for p in runs[place]) for place in sorted(runs))
    family = [*host, shapes.type_name(source), "".join(str(rank[place]) for place in runs)]
    return _Identity("copy", ":".join(family), sizes)
