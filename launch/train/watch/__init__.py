"""What a training run shows: speed, results as JSON, and TensorBoard files."""
