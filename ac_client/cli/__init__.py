"""The commands of `autoac`, by what they do; cli.py puts them together. Heavy imports stay inside."""
