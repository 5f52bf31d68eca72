"""Move storages to the host in forward and back in backward."""
