"""The layer between JAX and XLA: lowering to HLO and back, compiler hooks, deviceless compilation, memory needs."""
