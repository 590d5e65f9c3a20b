"""The command line of dhelix and what runs on several hosts. Start at `cli.py`."""
