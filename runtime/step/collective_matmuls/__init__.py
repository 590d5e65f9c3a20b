"""Replaces collectives next to matrix products by collective matmuls in a step.

jax_forms.py    the passes that do this, with programs that JAX lowers
weighing.py     decides which sites a step with two strands should not replace
"""
