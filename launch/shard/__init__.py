"""`dhelix shard`: chooses over how many GPUs parameters, gradients and optimizer states are sharded."""
