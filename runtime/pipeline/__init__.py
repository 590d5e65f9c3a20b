"""Executes a pipeline schedule (`dhelix.passes.pipeline_fold`) as one SPMD program. Start at `executor.py`."""
