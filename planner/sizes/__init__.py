"""Profiles of a step at sizes that were not profiled."""
