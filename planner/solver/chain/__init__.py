"""Solve a chain of blocks by dynamic programming: a bound where the relaxation is weak, and save sets."""
