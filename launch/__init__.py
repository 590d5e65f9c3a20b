"""The command line of dhelix, including training on several hosts. Start at `cli.py`."""
