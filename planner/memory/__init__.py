"""Compute what a save set does to memory: the events of a step, and the bytes live after each."""
