"""The schedules of pipelines, one module each; `catalogue.py` has them by name."""
