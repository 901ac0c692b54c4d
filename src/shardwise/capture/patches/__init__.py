"""The table of patches of torch that capturing a graph needs, one a file.

`shardwise.capture.patching` applies them. The order matters if two patches replace one call, or rewrite one program: the first has
precedence.
"""

from __future__ import annotations

from importlib import import_module

from shardwise.capture.patches.patch import Patch

_WHILE_TRACED = "silenced_logs cuda_driver recorded_lines lstm_states"
_CALL_HOOKS = """
    generators acts_in_backward foreign_parameters tensor_data values_of_constants value_checks float64_numbers foreach class_losses ctc
    embedding_bag gaussian_nll affine_grid bincount contiguous covariance
"""
_WHILE_CALLED = "python_randomness replaced_state autograd_functions distributions causal_masks casts experts"
_REWRITES = "assertions masked_rows complex_parameters row_per_sample"
PATCHES: tuple[Patch, ...] = tuple(
    import_module(f"{__name__}.{name}").PATCH for group in (_WHILE_TRACED, _CALL_HOOKS, _WHILE_CALLED, _REWRITES) for name in group.split()
)
