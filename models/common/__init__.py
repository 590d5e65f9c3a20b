"""What all models share.

mesh.py               the mesh axes by name, and what each of them splits
decoder_config.py     sizes of any decoder, and the counts that follow from them
parameters.py         stacked layers: initial values, shardings, compute type
parallel.py           exchanges between devices: by hand, by XLA's partitioner, or none
layers.py             what the layers of several families have in common
context_parallel.py   sequences that devices share within attention: rings and all-gather
attention_blocks.py   attention of some queries to some keys, and its part of a larger derivative
cross_entropy.py      the loss over a sharded vocabulary
training.py           the train step as an object: state, optimizer, shardings, checks
"""
