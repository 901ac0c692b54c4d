"""The table of patches of torch that capturing a graph needs, one a file.

`weft.capture.patching` applies them. The order matters if two patches replace one call, or rewrite one program: the first has precedence.
"""

from __future__ import annotations

from importlib import import_module

from weft.capture.patches.patch import Patch

_TRACED = "silenced_logs cuda_driver recorded_lines lstm_states"
_CALLS = """
    generators acts_in_backward foreign_parameters tensor_data values_of_constants value_checks float64_numbers foreach class_losses ctc
    embedding_bag gaussian_nll affine_grid bincount contiguous covariance
"""
_CALLED = "python_randomness replaced_state autograd_functions distributions causal_masks casts experts"
_REWRITTEN = "assertions masked_rows complex_parameters row_per_sample"
PATCHES: tuple[Patch, ...] = tuple(
    import_module(f"{__name__}.{name}").PATCH for group in (_TRACED, _CALLS, _CALLED, _REWRITTEN) for name in group.split()
)
