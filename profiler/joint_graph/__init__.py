"""Sort the joint graph of a compiled step into forward and backward, cut it, and profile it."""
