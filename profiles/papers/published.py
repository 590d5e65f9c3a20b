"""Numbers that papers published about their clusters. Simulations are compared with these numbers.

    Published("DHelix", "Llama, S 8192", "speed-up over Megatron-LM", 1.27, "x", "section 6.2.1", upper=1.40)

This module has numbers from the texts and tables of the papers. Numbers that appear only in figures are left out,
except for the bars of DHelix figures 11 to 13. The values of these bars are read off the authors' charts and are marked
`chart`. If a paper has a misprint, `value` is corrected, and `printed` has the printed text and the reason.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A published number, or a published range of numbers.

    Attributes:
      system: the measured system, such as `DHelix` or `Megatron-LM`.
      workload: model, sequence length S, parallelism and number of GPUs, as far as the paper gives them.
      quantity: what was measured or computed.
      value: the number, or the lower end of the range.
      unit: unit of `value`; `x` stands for a ratio, `%` for a percentage.
      where: section, table or figure of the paper.
      upper: upper end of the range; None for a single number.
      chart: whether the number is read off a chart. Such a number is accurate to about 1 %.
      printed: the number that the paper prints instead, and why it is a misprint; empty if the paper prints `value`.
    """

    system: str
    workload: str
    quantity: str
    value: float
    unit: str
    where: str
    upper: float | None = None
    chart: bool = False
    printed: str = ""


_P = Published
_OVER_MEGATRON, _OVER_INTRA, _OVER_WAVELET = (
    f"speed-up over {baseline}" for baseline in ("Megatron-LM", "Intra-batch", "Wavelet+")
)
_HIDDEN, _SHARE = "communication hidden", "share of time in communication"
_MFU = "MFU"


def _bars(where: str, quantity: str, workloads: tuple[str, ...], **systems: tuple[float, ...]) -> tuple[_P, ...]:
    return tuple(
        _P(system.replace("_", "-").replace("Plus", "+"), workload, quantity, value, "x", where, chart=True)
        for system, values in systems.items()
        for workload, value in zip(workloads, values, strict=True)
    )


_LLAMA_39B_16K = "Llama-39B, S 16384, CP 2"
_LLAMA_39B_32K = "Llama-39B, S 32768, CP 4"
_PHI_31B = "Phi-31B, EP 8, DP 16, PP 4, capacity 6"
_GAIN = "gain over Megatron-LM, each step beside those before"
_MAX_MODEL = "Llama-25B layers, DP 4, TP 8, PP 2, micro-batch 1"

DHELIX_A40: tuple[Published, ...] = (
    _P("DHelix", "all", "speed-up over the baselines", 1.12, "x", "abstract", upper=1.40),
    _P("DHelix", "best of all", _MFU, 58, "%", "abstract"),
    _P("DHelix", "Llama, S 8192", _OVER_MEGATRON, 1.27, "x", "section 6.2.1", upper=1.40),
    _P("DHelix", "Llama, S 8192", _OVER_INTRA, 1.15, "x", "section 6.2.1", upper=1.28),
    _P("DHelix", "Llama, S 8192", _OVER_WAVELET, 1.21, "x", "section 6.2.1", upper=1.25),
    _P("DHelix", "GPT, S 8192", _OVER_MEGATRON, 1.26, "x", "section 6.2.1", upper=1.40),
    _P("DHelix", "GPT, S 8192", _OVER_INTRA, 1.15, "x", "section 6.2.1", upper=1.33),
    _P("DHelix", "GPT, S 8192", _OVER_WAVELET, 1.12, "x", "section 6.2.1", upper=1.25),
    _P("DHelix", "S 16384, CP 2", _OVER_MEGATRON, 1.22, "x", "section 6.2.2", upper=1.39),
    _P("DHelix", "S 16384, CP 2", _OVER_INTRA, 1.13, "x", "section 6.2.2", upper=1.30),
    _P("DHelix", "S 16384, CP 2", _OVER_WAVELET, 1.11, "x", "section 6.2.2", upper=1.30),
    _P("Intra-batch", "S 8192", _OVER_MEGATRON, 1.05, "x", "section 6.2.1", upper=1.15),
    _P("Wavelet+", "S 8192", _OVER_MEGATRON, 1.06, "x", "section 6.2.1", upper=1.16),
    *_bars("figure 11", _OVER_MEGATRON, ("Llama-8B, S 8192", "Llama-25B, S 8192", "Llama-39B, S 8192"),
           Intra_batch=(1.06, 1.09, 1.10), WaveletPlus=(1.06, 1.16, 1.02), DHelix=(1.31, 1.40, 1.27)),
    *_bars("figure 11", _OVER_MEGATRON, ("GPT-6.7B, S 8192", "GPT-18B, S 8192", "GPT-30B, S 8192"),
           Intra_batch=(1.10, 1.05, 1.15), WaveletPlus=(1.13, 1.12, 1.13), DHelix=(1.26, 1.40, 1.36)),
    *_bars("figure 12", _OVER_MEGATRON,
           ("Llama-8B, S 16384, CP 2", "Llama-25B, S 16384, CP 2", _LLAMA_39B_16K),
           DHelix=(1.30, 1.30, 1.39)),
    *_bars("figure 12", _OVER_MEGATRON,
           ("GPT-6.7B, S 16384, CP 2", "GPT-18B, S 16384, CP 2", "GPT-30B, S 16384, CP 2"),
           DHelix=(1.31, 1.22, 1.23)),
    _P("Intra-batch", "S 8192", _HIDDEN, 26.1, "%", "section 6.2.1"),
    _P("Wavelet+", "S 8192", _HIDDEN, 39.9, "%", "section 6.2.1"),
    _P("DHelix", "S 8192", _HIDDEN, 83, "%", "section 6.2.1"),
    _P("Megatron-LM", _PHI_31B, "throughput", 59941, "tokens/s", "table 6"),
    _P("Wavelet+", _PHI_31B, "throughput", 62454, "tokens/s", "table 6"),
    _P("DHelix", _PHI_31B, "throughput", 75386, "tokens/s", "table 6"),
    _P("Wavelet+", _PHI_31B, _OVER_MEGATRON, 1.042, "x", "table 6",
       printed="5 %; 62454 / 59941 is 1.042"),
    _P("DHelix", _PHI_31B, _OVER_MEGATRON, 1.258, "x", "table 6",
       printed="27 %; 75386 / 59941 is 1.258"),
    _P("Megatron-LM", "Llama-39B", f"{_SHARE} (TP, CP)", 55, "%", "section 3.1, figure 3"),
    _P("Megatron-LM", "Phi-31B", f"{_SHARE} (EP)", 34.3, "%", "section 3.1, figure 3"),
    _P("Megatron-LM", "CP 2", f"{_SHARE} (TP)", 29, "%", "section 6.3.1"),
    _P("Megatron-LM", _LLAMA_39B_16K, f"{_SHARE} (CP)", 28, "%", "section 6.4"),
    _P("Megatron-LM", _LLAMA_39B_32K, f"{_SHARE} (CP)", 53, "%", "section 6.4"),
    *(_P(f"DHelix, {step}", workload, _GAIN, value, "%", "section 6.4, figure 15")
      for workload, values in ((_LLAMA_39B_16K, (11.18, 22.5, 0, 5)), (_LLAMA_39B_32K, (5.37, 14.4, 7, 1)))
      for step, value in zip(("+ TP", "+ CP", "+ comm-comm", "+ wgrad"), values, strict=True)),
    _P("Megatron-LM", _MAX_MODEL, "largest model", 40, "B parameters", "section 6.5"),
    _P("DHelix", _MAX_MODEL, "largest model", 39, "B parameters", "section 6.5"),
    _P("bidirectional", _MAX_MODEL, "largest model", 32, "B parameters", "section 6.5"),
    _P("DHelix", "all", "extra memory, at most", 3, "%", "abstract"),
)  # fmt: skip

_LLAMA_66B_16K = "Llama-66B, S 16384, TP 8, CP 2"
_LLAMA_66B_32K = "Llama-66B, S 32768, TP 8, CP 4"
DHELIX_A800: tuple[Published, ...] = (
    _P("Megatron-LM", _LLAMA_66B_16K, "throughput", 186, "TFLOPS/GPU", "section 6.3.1"),
    _P("Megatron-LM", _LLAMA_66B_16K, _MFU, 60, "%", "section 6.3.1"),
    _P("Megatron-LM", _LLAMA_66B_16K, f"{_SHARE} (TP)", 10, "%", "section 6.3.1"),
    _P("Megatron-LM", _LLAMA_66B_32K, "throughput", 160.9, "TFLOPS/GPU", "section 6.3.1"),
    _P("Megatron-LM", _LLAMA_66B_32K, _MFU, 52, "%", "section 6.3.1"),
    _P("DHelix", _LLAMA_66B_32K, "throughput", 199.7, "TFLOPS/GPU", "section 6.3.1"),
    _P("DHelix", _LLAMA_66B_32K, _MFU, 64, "%", "section 6.3.1"),
    _P("DHelix", _LLAMA_66B_32K, _HIDDEN, 82, "%", "figure 16, caption"),
    _P("DHelix", "Llama-66B", _OVER_MEGATRON, 1.07, "x", "section 6.3.1", upper=1.24),
    _P("DHelix", "Llama-66B", _OVER_WAVELET, 1.05, "x", "section 6.3.1", upper=1.14),
    *_bars("figure 13a", _OVER_MEGATRON, (_LLAMA_66B_16K, _LLAMA_66B_32K), DHelix=(1.07, 1.24)),
    _P("Wavelet+", "Phi-42B, capacity 8", _OVER_MEGATRON, 1.04, "x", "section 6.3.2"),
    _P("DHelix", "Phi-42B, capacity 8", _OVER_MEGATRON, 1.15, "x", "section 6.3.2"),
    _P("DHelix", "all", "speed-up over the baselines", 1.02, "x", "abstract", upper=1.29),
    _P("DHelix", "all", "largest speed-up over Megatron-LM", 1.29, "x", "section 6.3.3"),
    _P("DHelix", "best of all", _MFU, 71, "%", "abstract"),
)  # fmt: skip

DHELIX_H100: tuple[Published, ...] = (
    _P("DHelix", "Llama-3.1-405B layers, TP 8 to 32", "largest speed-up over Megatron-LM", 1.17, "x",
       "section 6.3.3"),
    *(_P("DHelix", f"Llama-3.1-405B layers, TP {size}", quantity, value, "% of communication", "table 7")
      for size, values in ((8, (57.87, 32.48, 9.65)), (16, (66.73, 23.01, 10.26)), (32, (51.72, 29.45, 18.83)))
      for quantity, value in zip(("hidden", "visible: slow-down", "visible: launch interval"), values, strict=True)),
)  # fmt: skip

_405B = "Llama-3.1-405B"
DHELIX_TABLE_1: tuple[Published, ...] = tuple(
    _P("estimate", f"{_405B}, {gpus} GPUs, {split}", quantity, value, unit, "table 1", printed=printed)
    for gpus, split, rows in (
        (8192, "DP 64, TP 8, PP 16", (
            ("local communication", 0.98, "s", ""), ("local communication", 441, "GB", ""),
            ("cross-node communication", 0.17, "s", ""), ("cross-node communication", 8.6, "GB", ""),
            ("cross-node share", 14.8, "%", ""))),
        (16384, "DP 128, TP 8, PP 16", (
            ("local communication", 0.49, "s", "0.3 s; 220 GB at the 450 GB/s of the other columns take 0.49 s"),
            ("local communication", 220, "GB", ""),
            ("cross-node communication", 0.15, "s", ""), ("cross-node communication", 7.7, "GB", ""),
            ("cross-node share", 23.5, "%", "33 %, which follows from the misprinted 0.3 s"))),
        (16384, "DP 8, TP 8, PP 16, CP 16", (
            ("local communication", 7.84, "s", ""), ("local communication", 3528, "GB", ""),
            ("cross-node communication", 7.52, "s", ""), ("cross-node communication", 376, "GB", ""),
            ("cross-node share", 49.0, "%", "49.9 %; 7.52 / (7.84 + 7.52) is 49.0 %"))),
    )
    for quantity, value, unit, printed in rows
)  # fmt: skip

_K8192 = "[M 1024, N 8192, K 8192] over 4 GPUs"
_K28672 = "[M 1024, N 8192, K 28672] over 4 GPUs"
_K_PRINTED = "row K 28112; Llama-3-70B's down projection has K 28672 (section 3)"
DISTFUSE: tuple[Published, ...] = (
    *(_P(system, workload, quantity, value, "us", "table 1", printed=printed)
      for workload, values, printed in (
          (_K8192, (166.0, 221.0, 387.0, 168.9, 234.5, 403.4, 333.8), ""),
          (_K28672, (534.5, 221.0, 764.5, 536.6, 234.5, 771.1, 621.6), _K_PRINTED))
      for (system, quantity), value in zip(
          (("PyTorch", "GEMM"), ("PyTorch", "all-reduce"), ("PyTorch", "GEMM, then all-reduce"),
           ("DistFuse", "GEMM"), ("DistFuse", "all-reduce"), ("DistFuse", "GEMM, then all-reduce"),
           ("DistFuse", "GEMM and all-reduce, overlapped")), values, strict=True)),
    _P("DistFuse", _K8192, "speed-up over PyTorch", 1.159, "x", "table 1"),
    _P("DistFuse", _K28672, "speed-up over PyTorch", 1.230, "x", "table 1", printed=_K_PRINTED),
    _P("DistFuse", "both rows", "speed-up over PyTorch", 1.205, "x", "section 3.3"),
    _P("DistFuse", "both rows", "reduction of the all-reduce's latency", 44.3, "%", "section 3.3"),
    _P("DistFuse", "both rows", "tile-wise all-reduce slower than NCCL's", 6, "%", "section 3.3"),
    _P("vLLM with tile-wise all-reduce", "Llama-3-70B inference", "speed-up of the end-to-end latency", 5.2, "%",
       "section 3.3", upper=11.1),
    _P("PyTorch", "Llama-3-70B inference", _SHARE, 8.43, "%", "section 3.3", upper=25.05),
)  # fmt: skip

_MFU_FULL = "MFU (causal attention not halved)"
_AT_1024 = "1024 GPUs, S 4096, micro-batch 1, batch 4 M tokens"
_AT_8 = "8 GPUs, S 4096, micro-batch 1, batch 4 M tokens"
_AT_64 = "64 GPUs, S 4096, micro-batch 1"
_OVERLAPS = ("all-gather, reduce-scatter, all-reduce, broadcast", "all-gather, reduce-scatter, all-reduce",
             "all-gather, reduce-scatter", "nothing")  # fmt: skip
# Table V. There is a row for each entry of _OVERLAPS. A row has tokens per GPU and second for 1, 2, 4 and 8
# micro-batches, then MFU for the same numbers of micro-batches.
_TABLE_V = {
    "LLaMA-7B": ((3525, 4119, 4416, 4503, 0.57, 0.62, 0.65, 0.67), (3346, 3991, 4329, 4438, 0.54, 0.60, 0.64, 0.65),
                 (2812, 3609, 4070, 4286, 0.45, 0.54, 0.60, 0.63), (2812, 3609, 4070, 4286, 0.45, 0.54, 0.60, 0.63)),
    "LLaMA-13B": ((1918, 2082, 2183, 2230, 0.53, 0.58, 0.61, 0.62), (1895, 1920, 2160, 2184, 0.53, 0.54, 0.60, 0.61),
                  (1630, 1782, 2033, 2126, 0.45, 0.49, 0.56, 0.59), (1527, 1552, 1608, 1666, 0.42, 0.43, 0.44, 0.46)),
    "LLaMA-30B": ((825, 856, 872, 880, 0.48, 0.50, 0.50, 0.51), (759, 814, 847, 859, 0.44, 0.47, 0.49, 0.50),
                  (651, 740, 814, 842, 0.37, 0.43, 0.47, 0.49), (557, 654, 678, 719, 0.33, 0.38, 0.39, 0.42)),
}  # fmt: skip
AMSP: tuple[Published, ...] = (
    *(_P(system, f"{model}, {_AT_1024}", _MFU_FULL, value, "%", where, printed=printed)
      for system, model, value, where, printed in (
          ("AMSP", "LLaMA-7B", 51, "section VI-B", ""),
          ("AMSP", "LLaMA-13B", 52, "section VI-B", "51 % as well, further on"),
          ("AMSP", "LLaMA-30B", 42, "section VI-B", "43 % as well, further on"),
          ("MiCS", "LLaMA-7B", 35, "section VI-B", ""), ("MiCS", "LLaMA-13B", 33, "section VI-B", ""),
          ("MiCS", "LLaMA-30B", 29, "section VI-B", ""), ("ZeRO-1", "LLaMA-7B", 36, "section VI-B", ""),
          ("ZeRO-3", "LLaMA-7B", 4, "section VI-B", ""), ("ZeRO-3", "LLaMA-13B", 4, "section III-A", ""),
          ("ZeRO++", "LLaMA-7B", 4, "section VI-B", ""), ("ZeRO++", "LLaMA-13B", 6, "section I", ""),
          ("ZeRO++", "LLaMA-30B", 5, "section I", ""))),
    *(_P(system, f"{model}, {_AT_8}", _MFU_FULL, value, "%", where)
      for system, model, value, where in (
          ("ZeRO-1", "LLaMA-7B", 63, "section III-A"), ("AMSP", "LLaMA-7B", 64, "section III-C"),
          ("ZeRO-3", "LLaMA-13B", 47, "section III-A"), ("MiCS", "LLaMA-7B", 50, "section III-C"))),
    *(_P("AMSP", f"{model}, {_AT_1024}", "speed-up over MiCS's factors in AMSP's engine", value, "x", "section VI-D")
      for model, value in (("LLaMA-7B", 1.3), ("LLaMA-13B", 1.1), ("LLaMA-30B", 1.13))),
    _P("AMSP", _AT_1024, "speed-up over MiCS and ZeRO++", 1.4, "x", "section I", upper=12.7),
    _P("ZeRO-3", "LLaMA-30B, 512 GPUs", "memory", 16, "GB", "section VI-B"),
    _P("ZeRO-3", "LLaMA-30B, 1024 GPUs", "memory", 15, "GB", "section VI-B"),
    *(_P(f"AMSP, overlapping {overlapped}", f"{model}, {_AT_64}, {micro_batches} micro-batches", quantity,
         round(scale * row[column + index], 6), unit, "table V")
      for model, rows in _TABLE_V.items()
      for overlapped, row in zip(_OVERLAPS, rows, strict=True)
      for quantity, unit, scale, column in (("throughput", "tokens/s/GPU", 1, 0), (_MFU_FULL, "%", 100, 4))
      for index, micro_batches in enumerate((1, 2, 4, 8))),
)  # fmt: skip

_LAGOM_BOTH: tuple[Published, ...] = (
    _P("Lagom", "FSDP, 8 and 16 GPUs", "speed-up over NCCL", 1.10, "x", "section 4.2", upper=1.33),
    _P("Lagom", "TP 8", "speed-up over NCCL", 1.08, "x", "section 4.2", upper=1.16),
    _P("Lagom", "EP 8", "speed-up over NCCL", 1.07, "x", "section 4.2", upper=1.08),
    _P("AutoCCL", "TP 8 and EP 8", "speed-up over NCCL", 1.03, "x", "section 4.2", upper=1.09),
    _P("Lagom", "all", "speed-up over AutoCCL", 1.03, "x", "abstract", upper=1.27),
    _P("NCCL", "computation-bound", "largest slow-down of computation by contention", 35, "%", "section 1"),
    _P("AutoCCL", "two collectives in one overlap", "iterations until it converges", 16, "", "section 4.4"),
    _P("Lagom", "two collectives in one overlap", "iterations until it converges", 33, "", "section 4.4"),
)  # fmt: skip
_PHI_2 = "Phi-2-2B, FSDP, 8 GPUs"
LAGOM_NVLINK: tuple[Published, ...] = (
    *_LAGOM_BOTH,
    _P("AutoCCL", f"{_PHI_2}, pattern 1 (all-gather, NC 61)", "speed-up over NCCL (NC 8, C 2 MB)", 0.87, "x",
       "section 4.3"),
    _P("Lagom", f"{_PHI_2}, pattern 1 (all-gather, NC 2, C 684 KB)", "speed-up over NCCL (NC 8, C 2 MB)", 1.35,
       "x", "section 4.3"),
    _P("Lagom", f"{_PHI_2}, pattern 2 (reduce-scatter, NC 4, C 1366 KB)", "speed-up over NCCL (NC 8, C 2 MB)",
       1.43, "x", "section 4.3"),
)  # fmt: skip
LAGOM_PCIE: tuple[Published, ...] = (
    *_LAGOM_BOTH,
    _P("NCCL", "FFN beside an all-reduce of 32 MB over 8 GPUs", "computation slower at 32 channels than at 16",
       30.2, "%", "section 3.2, figure 3", printed="differs by 30.2 %, not said of which"),
)  # fmt: skip
