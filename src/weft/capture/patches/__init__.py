"""What torch does otherwise than a captured graph needs: a table of patches, one thing a file. In: nothing. Out: `PATCHES`.

`weft.capture.patched` applies them all. The order matters where two patches answer one call, or rewrite one program: the first comes first.
"""

from __future__ import annotations

from weft.capture.patches import (
    acts_in_backward,
    affine_grid,
    assertions,
    autograd_functions,
    bincount,
    casts,
    causal_masks,
    class_losses,
    complex_parameters,
    covariance,
    ctc,
    cuda_driver,
    data,
    distributions,
    embedding_bag,
    float64_numbers,
    foreach,
    foreign_parameters,
    gaussian_nll,
    generators,
    lstm_states,
    masked_rows,
    messages,
    own_rows,
    python_randomness,
    recorded_lines,
    replaced_state,
    value_checks,
    values_of_constants,
)
from weft.capture.patches.patch import Patch

PATCHES: tuple[Patch, ...] = tuple(
    module.PATCH
    for module in (
        # What torch is told while it traces.
        messages,
        cuda_driver,
        recorded_lines,
        lstm_states,
        # What the model calls.
        generators,
        acts_in_backward,
        foreign_parameters,
        data,
        values_of_constants,
        value_checks,
        float64_numbers,
        foreach,
        class_losses,
        ctc,
        embedding_bag,
        gaussian_nll,
        affine_grid,
        bincount,
        covariance,
        # What holds while the model is called.
        python_randomness,
        replaced_state,
        autograd_functions,
        distributions,
        causal_masks,
        casts,
        # What torch has made of it.
        assertions,
        masked_rows,
        complex_parameters,
        own_rows,
    )
)
