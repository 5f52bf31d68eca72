"""A device named "cuda" on a CPU build of torch, and tests that run on it. See README.md."""
