"""Keys of instructions of scheduled GPU programs: what counts, what does not, and layers in loops."""

import pytest

from dhelix.benchmarks.programs.structure import Case, lower
from dhelix.passes.evaluation.operator_keys import OperatorKeys, key_of
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, parse
from dhelix.runtime.compiler import deviceless, lowering
from dhelix.tests.passes import golden

CALLS = HloModule.from_text(golden.read("operator_keys/calls.hlo"))
LAYERS = ("forward", "backward")


def named(name: str, module: HloModule = CALLS) -> Instruction:
    return next(i for i in module.entry.instructions if i.name == name)


def layer(which: str, layers: int = 4) -> HloModule:
    """The body of a layer loop, as compiled for `layers` layers."""
    text = golden.read(f"operator_keys/{which}_layer.hlo")
    return HloModule.from_text(text.replace("[4,", f"[{layers},").replace("constant(3)", f"constant({layers - 1})"))


def keys(module: HloModule) -> list[Key | None]:
    return [key_of(i) for i in module.schedule[module.entry]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nn", "gemm bf16,bf16->bf16:nn:cublaslt 64x256x512"),
        ("nt", "gemm bf16,bf16->bf16:nt:cublaslt 64x256x512"),
        ("wgrad", "gemm bf16,bf16->f32:tn:cublas 512x256x64"),
        ("adding", "gemm bf16,bf16->bf16:nn:cublaslt:accumulate 64x256x512"),
        ("activated", "gemm bf16,bf16->bf16:nn:cublaslt:bias_gelu 64x256x512"),
        ("precise", "gemm bf16,bf16->bf16:nn:cublaslt:highest 64x256x512"),
        ("batched", "gemm bf16,bf16->bf16:bnn:cublaslt 64x256x512x8"),
        ("inner_batch", "gemm bf16,bf16->bf16:bmbk,bnk,bmn:cublaslt 1024x2048x64x16"),
        ("narrow", "gemm f8e4m3fn,f8e4m3fn->bf16:nt:cublaslt-f8 64x256x512"),
        ("triton", "gemm bf16,bf16->bf16:nn:triton 64x256x512"),
        ("cudnn_product", "gemm bf16,bf16->bf16:nn:cudnn 64x256x512"),
        ("grouped", "grouped-gemm bf16,bf16->bf16:ragged-m:01,012,01:cublaslt 64x256x512x8"),
        ("grouped_wgrad", "grouped-gemm bf16,bf16->bf16:ragged-k:01,01,012:cublaslt 512x256x64x8"),
        ("attention", "attention bf16:causal:bsnh:cudnn 2x8x2x1024x2048x64"),
        ("windowed", "attention bf16:causal:bnsh:bias:dropout:window:cudnn 2x8x2x1024x2048x64x128"),
        ("backward", "attention-backward bf16:no_mask:bsnh:cudnn 2x8x2x1024x2048x64"),
        ("copied", "copy contiguous 131072"),
        ("turned", "copy f32:10 512x64"),
        ("swapped_halves", "copy f32:102 16x32x64"),
        ("gather", "all-gather 65536B 4x1 groups=2 nccl"),
        ("scatter", "reduce-scatter 16384B 4x2 groups=2 nccl"),
        ("everywhere", "all-reduce 16384B 8x1 groups=1 nccl"),
        ("ring", "collective-permute 16384B 4x1 groups=1 nccl"),
        ("swap", "collective-permute 16384B 1x2 groups=2 nccl"),
        ("small", "all-reduce 16384B 2x1 groups=2 triton"),
    ],
)
def test_keys_say_what_decides_the_time(name: str, text: str) -> None:
    assert str(key_of(named(name))) == text


def test_what_autotuning_chose_and_where_it_stands_do_not_count() -> None:
    assert key_of(named("tuned")) == key_of(named("nn"))


def test_a_transposed_result_is_the_product_of_the_transposed() -> None:
    assert key_of(named("swapped")) == key_of(named("nn"))


def test_what_is_fused_into_a_product_counts() -> None:
    plain, scaled = key_of(named("triton")), key_of(named("triton_scaled"))
    assert isinstance(plain, OperatorKey) and isinstance(scaled, OperatorKey)
    assert scaled.family.startswith(f"{plain.family}:multiply-")
    assert scaled.sizes == plain.sizes


def test_groups_share_the_operations_of_a_grouped_product() -> None:
    for name in ("grouped", "grouped_wgrad"):
        key = key_of(named(name))
        assert isinstance(key, OperatorKey)
        assert key.flops == 2 * 64 * 256 * 512


def test_unknown_calls_are_told_apart_by_their_configuration() -> None:
    one, other = key_of(named("kernel")), key_of(named("other_kernel"))
    assert isinstance(one, OperatorKey) and one.kind == "other"
    assert one.family.startswith("my_kernel:")
    assert one != other


def test_what_is_free_or_control_flow_has_no_key() -> None:
    assert key_of(named("gathered")) is None
    assert key_of(named("result")) is None
    costs = HloModule.from_text(golden.read("costs/operators.hlo"))
    assert key_of(named("loop", costs)) is None
    assert key_of(named("state", costs)) is None


def test_nodes_and_implementation_are_the_callers() -> None:
    key = key_of(named("gather"), gpus_per_node=2, implementation="symmetric")
    assert str(key) == "all-gather 65536B 2x2 groups=2 symmetric"
    assert OperatorKeys(2, "symmetric")[named("gather")] == key


def test_keys_survive_as_text() -> None:
    found = [key for module in (CALLS, *map(layer, LAYERS)) for key in keys(module) if key is not None]
    assert len(found) > 100
    assert all(parse(str(key)) == key for key in found)


@pytest.mark.parametrize("which", LAYERS)
def test_keys_inside_a_layer_loop_do_not_depend_on_the_number_of_layers(which: str) -> None:
    four, eight = layer(which), layer(which, 8)
    assert keys(four) == keys(eight)
    work = [[(getattr(k, "flops", 0), k.bytes) for k in keys(m) if k] for m in (four, eight)]
    assert work[0] == work[1]


@pytest.mark.parametrize("which", LAYERS)
def test_instructions_of_one_key_do_the_same_work(which: str) -> None:
    work: dict[Key, tuple[float, int]] = {}
    for key in keys(layer(which)):
        if isinstance(key, OperatorKey):
            flops, moved = work.setdefault(key, (key.flops, key.bytes))
            assert key.flops == flops
            assert key.bytes == pytest.approx(moved, abs=16), "indices count too"


def test_a_layers_forward_pass() -> None:
    found = keys(layer("forward"))
    counts = {kind: len({k for k in found if k and k.kind == kind}) for kind in ("gemm", "attention", "fusion", "copy")}
    assert counts == {"gemm": 4, "attention": 1, "fusion": 17, "copy": 2}
    assert {str(k) for k in found if isinstance(k, CollectiveKey)} == {
        "all-gather 67108864B 4x1 groups=1 nccl",
        "reduce-scatter 67108864B 4x1 groups=1 nccl",
    }


def test_a_product_inside_slices_is_the_product() -> None:
    forward = layer("forward")
    sliced = key_of(named("dynamic_slice_fusion.13", forward))
    assert sliced == key_of(named("custom-call.7", forward))
    assert str(sliced) == "gemm bf16,bf16->bf16:nn:cublaslt 8192x3584x4096"


def test_an_async_fusion_has_the_key_of_the_fusion() -> None:
    forward = layer("forward")
    start = named("fusion-start.5", forward)
    assert start.opcode == "async-start"
    assert key_of(start) == key_of(start.called[0].root)
    key = key_of(start)
    assert isinstance(key, OperatorKey) and key.sizes == (4096 * 3584,)
    assert key.bytes == 2 * 2 * 4096 * 3584 + 4


@pytest.mark.slow
@pytest.mark.deviceless
def test_compiled_steps_of_more_layers_need_no_other_keys_in_their_layer_loops() -> None:
    """XLA may choose other fusions and schedules for each of the two programs, but their keys must be equal."""
    sizes = {"vocab": 8192, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 3072, "seq": 2048}
    found = []
    for layers in (4, 8):
        compiled = deviceless.compile(lower(Case("small", layers=layers, microbatches=4, overrides=sizes)))
        module = lowering.compiled_module(compiled)
        assert module is not None
        loops = [i for c in module.schedule for i in c.instructions if i.opcode == "while"]
        inner = [loop.called[0] for loop in loops if all(i.opcode != "while" for i in loop.called[0].instructions)]
        found.append({key_of(i) for body in inner for i in module.schedule[body]})
    assert len(found[0]) > 20
    assert found[0] == found[1]
