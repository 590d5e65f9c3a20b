"""The folder that PYTHONPATH names in processes of `dhelix run`. Python imports its `sitecustomize` at the start."""
