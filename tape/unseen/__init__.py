"""Find what kernels do that PyTorch does not dispatch: compare contents, and see Functions as one op."""
