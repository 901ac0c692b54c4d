"""Benchmark of this machine as a `Cluster`: takes seconds, is cached, and is repeated when the machine's speed changes. [torch]

`machine` describes it without measuring; `operators` and `transfers` are the benchmark cases, `sampling` times them, `rank` runs one rank,
`measure` builds a `Cluster` from the results of all ranks, and `cache` stores it.

Every figure is of training: forward and backward together, at shapes of real models. What is concurrent in training is
measured concurrently: all ranks multiply and copy together, so figures include shared caches, memory and clocks.
Not measured: thermal throttling in long runs, and other load. Between CUDA devices the figures are the catalogue's.
"""

from shardwise.cluster.probe.cache import probe

__all__ = ["probe"]
