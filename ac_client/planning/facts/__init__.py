"""Observe the steps of a training loop: its forwards and outputs, optimizers, neighbors, allocator."""
