"""Run solves: in child processes, in the service, and on workers."""
