"""dhelix: compiler passes for JAX/XLA that hide the communication of distributed LLM training."""
