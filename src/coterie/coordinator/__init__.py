"""Plan and supervise a run: serve the port, hand out stages, feed batches, collect losses and shards."""
