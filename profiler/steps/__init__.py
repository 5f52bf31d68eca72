"""Describe a profiled step: its loop, its records, and what is copied before it or put back after it."""
