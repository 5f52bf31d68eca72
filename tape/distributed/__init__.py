"""Profile models that are wrapped by DistributedDataParallel or `fully_shard`."""
