"""Decide which policy runs a batch, and when to plan again."""
