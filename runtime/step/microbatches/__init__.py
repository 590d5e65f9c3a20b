"""`value_and_grad` of the whole batch by a loop over micro-batches, and how their losses and gradients combine."""
