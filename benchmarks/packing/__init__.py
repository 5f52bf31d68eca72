"""Measure what it would buy to pack saved tensors without loss, such as a dropout mask into bits."""
