"""GPT and its relatives Phi-2 and MPT: sizes and presets, the layers, and the model."""
