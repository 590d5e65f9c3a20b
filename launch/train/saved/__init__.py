"""What a training run reads and writes: checkpoints of its own, and weights in the format of Hugging Face."""
