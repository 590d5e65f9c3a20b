"""Connects the passes with JAX and XLA: programs as HLO, compiler hooks, deviceless compilation, memory needs."""
