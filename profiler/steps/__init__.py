"""Run one fake training step for the profiler, and describe a step: its batch, its loss and its loop."""
