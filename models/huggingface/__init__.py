"""Checkpoints of Hugging Face: reads them into the models of dhelix, and writes them back.

configs.py   config.json and the configurations of dhelix
names.py     what a tensor is called there and here
layout.py    where each tensor lies in our arrays, and how it is turned
files.py     files of safetensors: one or several
weights.py   read and write
"""
