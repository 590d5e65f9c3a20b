"""The pipeline schedules, one module each; `catalogue.py` lists them by name."""
