"""Files to batches: readers, sample order, loaders."""
