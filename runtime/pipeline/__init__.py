"""Executes a pipeline schedule (`dhelix.passes.pipeline_fold`) as one SPMD program. Read `executor.py` first."""
