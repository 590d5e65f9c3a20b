"""A small model, for tests that compare numbers. Tests replace what they need otherwise."""

from dhelix.models import LlamaConfig

TINY = LlamaConfig(
    vocab=64, hidden=32, layers=2, heads=4, kv_heads=4, head_dim=8, ffn=48, seq=16, dtype="float32"
)  # fmt: skip
