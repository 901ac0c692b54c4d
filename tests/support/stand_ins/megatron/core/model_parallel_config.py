"""Sizes of one process."""

from dataclasses import dataclass


@dataclass
class ModelParallelConfig:
    """The two options that the page gives."""

    tensor_model_parallel_size: int = 1
    use_cpu_initialization: bool = False
