"""Adapters that run parallelized models in other training loops: `shardwise.adapters.transformers`, `.trl`, `.accelerate`, `.lightning`.

Each module exports a subclass of the library's own class that parallelizes the model and leaves everything else unchanged. The library
sees one process with one device and the global batch: all ranks load the same batches, so schedules, metrics, logs and whatever a loop
computes outside the model equal those of the serial run. Only the model itself is sharded.
"""
