"""Run one training step for the profiler: hollow or fake."""
