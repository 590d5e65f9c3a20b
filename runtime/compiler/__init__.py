"""Between JAX and XLA: lowering to HLO and back, the compiler hook, deviceless and tuned compiles, memory needs."""
