"""Run one training step for the profiler: hollow, fake, or next to a plain one."""
