"""What the steps of a training loop show: its forwards and outputs, optimizers, neighbors, allocator."""
