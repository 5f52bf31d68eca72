"""Carry out a policy in eager mode: record ops in forward, recompute them in backward."""
