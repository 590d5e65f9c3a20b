"""Replaces collectives next to matrix products in a step by collective matmuls.

jax_forms.py    makes the passes that replace these collectives, by programs that JAX lowers
weighing.py     decides which collectives stay in a step with two strands
"""
