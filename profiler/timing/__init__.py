"""Measure or estimate how long each op takes."""
