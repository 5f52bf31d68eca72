"""Put back what a profiled step changed: the batch, the model's tensors and its Python state."""
