"""Explain a plan to a person, in words, tables and pages."""
