"""Groups of one process."""


def initialize_model_parallel(tensor_model_parallel_size: int) -> None:
    assert tensor_model_parallel_size == 1
