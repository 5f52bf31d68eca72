"""Record the ops, the saved tensors and the allocations of a step."""
