"""Plan the stages of a pipeline-parallel model."""
