"""`value_and_grad` as a loop over micro-batches, and how losses and gradients of micro-batches combine."""
