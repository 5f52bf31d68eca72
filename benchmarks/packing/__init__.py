"""Measure what it buys to pack saved tensors without loss, such as a dropout mask into bits."""
