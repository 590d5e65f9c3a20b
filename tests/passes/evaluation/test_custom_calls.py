"""Families of custom calls, and what their kernels compute."""

import pytest

from dhelix.passes.evaluation.custom_calls import calls_of, family_of
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.operator_work import Work, work_of
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.profiles.estimates import roofline
from dhelix.profiles.estimates.interpolation import roofline_seconds
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import OperatorKey


def call(target: str, operands: str, result: str, config: str = "", numbers: str = "") -> Instruction:
    """A custom call; `operands` holds their types, separated by `; `."""
    types = operands.split("; ")
    parameters = "\n".join(f"  p{n} = {kind} parameter({n})" for n, kind in enumerate(types))
    names = ", ".join(f"p{n}" for n in range(len(types)))
    more = f", api_version=API_VERSION_TYPED_FFI, backend_config={{{config}}}" if config else ""
    attributes = f"{numbers}, " if numbers else ""
    line = f'  ROOT c = {result} custom-call({names}), {attributes}custom_call_target="{target}"{more}'
    return HloModule.from_text(f"HloModule m, is_scheduled=true\n\nENTRY e {{\n{parameters}\n{line}\n}}\n").entry.root


@pytest.mark.parametrize(
    ("target", "family", "work"),
    [
        ("__cudnn$fmhaSoftmax", "attention", "attention"),
        ("__cudnn$fmhaSoftmaxF8", "attention", "attention"),
        ("__cudnn$fmhaScaleBiasSoftmaxDropout", "attention", "attention"),
        ("__cudnn$fmhaSoftmaxBackward", "attention backward", "attention backward"),
        ("__cudnn$fmhaSoftmaxBackwardF8", "attention backward", "attention backward"),
        ("te_fused_attn_forward_ffi", "attention", "attention"),
        ("te_fused_attn_backward_ffi", "attention backward", "attention backward"),
        ("te_fused_attn_score_mod_backward_ffi", "attention backward", "attention backward"),
        ("te_self_fused_attn_forward", "attention", "attention"),
        ("__cublas$gemm", "GEMM", "product"),
        ("__cublas$lt$matmul", "GEMM", "product"),
        ("__cublas$lt$matmul$f8", "GEMM", "product"),
        ("__cudnn$blockScaledDot", "GEMM", "product"),
        ("te_gemm_v2_ffi", "GEMM", "product"),
        ("te_grouped_gemm_ffi", "grouped GEMM", "moves"),
        ("__cudnn$convForward", "convolution", "convolution"),
        ("te_norm_forward_ffi", "normalization", "moves"),
        ("te_layernorm_forward", "normalization", "moves"),
        ("te_rmsnorm_backward", "normalization", "moves"),
        ("te_act_lu_ffi", "activation", "moves"),
        ("te_dact_dbias_quantize_ffi", "activation", "moves"),
        ("te_dbias_quantize_ffi", "cast", "moves"),
        ("te_cast_transpose", "cast", "moves"),
        ("te_scaled_upper_triang_masked_softmax_forward_ffi", "softmax", "moves"),
        ("xla.gpu.ext.cub_sort_pairs", "sort", "moves"),
        ("__cub$DeviceRadixSort", "sort", "moves"),
        ("__gpu$TopK", "routing", "moves"),
        ("cu_threefry2x32_ffi", "random numbers", "moves"),
        ("AllocateBuffer", "buffer", "nothing"),
        ("__gpu$xla.gpu.triton", "Triton kernel", "unknown"),
        ("triton_kernel_call", "Triton kernel", "unknown"),
        ("mosaic_gpu_v2", "Mosaic GPU kernel", "unknown"),
        ("xla_ffi_python_gpu_callback", "Python callback", "unknown"),
        ("xla_python_gpu_callback", "Python callback", "unknown"),
        ("te_ep_dispatch_ffi", "communication kernel", "unknown"),
        ("my_nvshmem_put", "communication kernel", "unknown"),
        ("cusolver_geqrf_ffi", "linear algebra", "unknown"),
        ("flash_mla", "unknown", "unknown"),
    ],
)
def test_families_follow_from_targets(target: str, family: str, work: str) -> None:
    found = family_of(call(target, "f32[8]", "f32[8]"))
    assert (found.name, found.work) == (family, work)


def test_a_product_of_transformer_engine_counts_its_operations() -> None:
    scales = "f8e8m0fnu[512,8]; f8e4m3fn[128,256]; f8e8m0fnu[128,8]; f32[0]"
    found = work_of(call("te_gemm_v2_ffi", f"f8e4m3fn[512,256]; {scales}", "(bf16[512,128], u8[1024])"))
    assert (found.flops, found.unit, found.bits) == (2 * 512 * 256 * 128, "product", 8)


def test_a_product_that_also_communicates_is_unknown() -> None:
    config = "config = {collective_op = 1 : i64, lhs_transposed = false}"
    found = call("te_gemm_v2_ffi", "bf16[512,256]; f32[1]; bf16[128,256]", "bf16[512,128]", config)
    assert family_of(found).name == "GEMM with communication"
    plain = call(
        "te_gemm_v2_ffi", "bf16[512,256]; f32[1]; bf16[128,256]", "bf16[512,128]", config.replace("1 :", "0 :")
    )
    assert family_of(plain).name == "GEMM"


ATTENTION = 2 * 2048 * 4096 * 32 * 128  # batch, queries, keys, heads, head size


@pytest.mark.parametrize(
    "operands",
    [
        "bf16[2,2048,32,128]; bf16[2,4096,8,128]; bf16[2,4096,8,128]; bf16[0]; u32[2]",
        "bf16[2,2048,32,128]; bf16[2,4096,2,8,128]; bf16[0]; bf16[0]; u32[2]",
    ],
)
def test_attention_of_transformer_engine_counts_its_operations(operands: str) -> None:
    result = "(bf16[2,2048,32,128], f32[2,32,2048,1], u32[2])"
    whole = work_of(call("te_fused_attn_forward_ffi", operands, result, "mask_type = 0 : i64"))
    assert (whole.flops, whole.unit) == (2 * 2 * ATTENTION, "attention")
    causal = work_of(call("te_fused_attn_forward_ffi", operands, result, "mask_type = 2 : i64"))
    assert causal.flops == whole.flops / 2
    backward = work_of(call("te_fused_attn_backward_ffi", operands, result, "mask_type = 2 : i64"))
    assert backward.flops == 5 * ATTENTION


def test_attention_of_one_packed_array_counts_its_operations() -> None:
    found = work_of(call("te_fused_attn_forward_ffi", "bf16[2,2048,3,32,128]; bf16[0]", "bf16[2,2048,32,128]"))
    assert found.flops == 2 * 2 * 2 * 2048 * 2048 * 32 * 128


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("Forward", "bf16[8,32,32,64]; bf16[3,3,64,128]", "bf16[8,32,32,128]"),
        ("BackwardInput", "bf16[8,32,32,128]; bf16[3,3,64,128]", "bf16[8,32,32,64]"),
        ("BackwardFilter", "bf16[8,32,32,64]; bf16[8,32,32,128]", "bf16[3,3,64,128]"),
    ],
)
def test_convolutions_and_their_derivatives_count_their_operations(target: str, operands: str, result: str) -> None:
    numbers = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
    made = call(f"__cudnn$conv{target}", operands, f"({result}, u8[0])", numbers=numbers)
    assert work_of(made).flops == 2 * (8 * 32 * 32 * 128) * (3 * 3 * 64)


def test_a_profile_knows_what_bounds_a_kernel_that_it_never_measured() -> None:
    attention = call("te_fused_attn_backward_ffi", "bf16[2,2048,3,32,128]; bf16[0]", "bf16[2,2048,32,128]")
    key = key_of(attention)
    assert isinstance(key, OperatorKey) and key.kind == "attention-backward"
    assert roofline_seconds(key, H200) == roofline.attention_seconds(key.flops, key.bytes, H200)
    key = key_of(call("te_gemm_v2_ffi", "f8e4m3fn[512,256]; f32[1]; f8e4m3fn[128,256]", "bf16[512,128]"))
    assert isinstance(key, OperatorKey) and (key.kind, key.flops) == ("gemm", 2 * 512 * 256 * 128)
    assert str(key_of(call("flash_mla", "f32[64]", "f32[64]"))).startswith("other flash_mla:")


def test_what_nobody_knows_counts_by_what_it_moves() -> None:
    assert work_of(call("flash_mla", "f32[64]; f32[64]", "f32[64]")) == Work(0.0, 3 * 256)
    assert work_of(call("AllocateBuffer", "f32[]", "f32[64]")) == Work(0.0, 0)


def test_calls_in_fusions_are_found() -> None:
    text = """HloModule m, is_scheduled=true

fused {
  p = f32[8] parameter(0)
  ROOT c = f32[8] custom-call(p), custom_call_target="flash_mla"
}

ENTRY e {
  p = f32[8] parameter(0)
  ROOT f = f32[8] fusion(p), kind=kCustom, calls=fused
}
"""
    (found,) = calls_of(HloModule.from_text(text).entry.root)
    assert family_of(found).work == "unknown"
