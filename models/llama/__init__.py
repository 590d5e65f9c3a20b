"""Llama: sizes and presets, the model, and inference."""
