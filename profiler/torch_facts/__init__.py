"""Collect the facts about torch that the profiler and the client share."""
