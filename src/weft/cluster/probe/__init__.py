"""This machine as a `Cluster`: measured in seconds, kept in the user's cache, read from there until it computes at another speed. [torch]

`machine` says what is there without measuring; `operators` and `messages` are what is timed, `timing` is how, `rank` is what one rank of
it does, `here` makes a `Cluster` of what all ranks found, and `kept` stores it.

Every figure is of training: forward and backward together, at shapes that real models have. What runs at once in training is
measured at once: all ranks multiply and copy together, so shared caches, memory and clocks are in the figures.
Not measured: long runs that heat the machine, and other work on it. Between CUDA devices the figures are the catalogue's.
"""

from weft.cluster.probe.kept import probe

__all__ = ["probe"]
