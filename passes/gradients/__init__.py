"""LOWERED passes on what accumulates gradients: layer by layer, and open over replicas until the last micro-batch."""
