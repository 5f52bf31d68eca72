"""Hold saved tensors without loss in fewer bytes."""
