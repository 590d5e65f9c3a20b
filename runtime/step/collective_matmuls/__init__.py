"""What a step does to collectives beside matrix products.

jax_forms.py    the passes that put collective matmuls in their place, whose programs JAX lowers
weighing.py     which of them a step with strands is better without
"""
