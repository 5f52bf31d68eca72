"""Measure planned steps: memory over time, peaks, and the cost of recording."""
