"""Measure plans, peaks and times; run one as `python -m benchmarks.NAME`."""
