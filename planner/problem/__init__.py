"""Define the problem that a plan solves: a Graph of ops, storages and backward steps."""
