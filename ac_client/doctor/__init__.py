"""Run on a GPU what only a GPU can settle, and report it: `autoac doctor --gpu`."""
