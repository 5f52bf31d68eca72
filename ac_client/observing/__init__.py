"""Profile a training step that runs once, for real, without a plan."""
