"""`dhelix train`: trains a language model on text. `trainer.py` runs the training, `data.py` reads the text, and
`checkpoint.py` saves the state. `options.py` and `step_flags.py` hold the options and flags of the step, which other
commands use, too.
"""
