"""Read graphs of several formats into StepGraphs; `files.py` finds the format of a file."""
