"""Planned training inside other libraries' loops, next to plain."""
