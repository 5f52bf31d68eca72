"""Run the checkpoints that a model brings along as plain calls, for a plan to decide in their place."""
