"""`dhelix train`: trains a Llama on text. `trainer.py` is the run, `data.py` its text, `checkpoint.py` its checkpoints;
`options.py` and `step_flags.py` say which step, for other commands too."""
