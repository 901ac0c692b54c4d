"""What a plain loop holds and copies beside an engine (`run/loop`), in bytes and seconds of one stage.

Autograd gives each parameter a gradient of its own: where gradients are all-reduced, it is there beside the bucket that it is copied to,
until that is full, or for good where ranks share the bucket's memory.
With ZeRO of any stage weights are stored in shards, gathered for forward and freed in backward (zero=3: gathered anew), and gradients are
scattered by bucket: as an engine's zero=2 and 3. A gathered bucket is flat first, and then copied to whole weights. Not modelled: what
the user's optimizer needs beside its state, and parts of a heterogeneous cluster.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.cost.devices.devices import Widths
from shardwise.cost.memory.memory import MARGIN, StageMemory, StageState
from shardwise.plan.layout import Layout

COPY_BYTES = 2  # a copy reads and writes


def layout_as_held(layout: Layout) -> Layout:
    """Return the layout whose weights and gradients an engine holds as a plain loop does.

    >>> layout_as_held(Layout(data=4, zero=1)).zero, layout_as_held(Layout(data=4)).zero
    (2, 0)
    """
    return replace(layout, zero=2) if layout.zero == 1 else layout


def add_plain_loop(memory: StageMemory, state: StageState, layout: Layout, widths: Widths, copies_out: bool) -> StageMemory:
    """Return `memory`, which an engine has under `layout_as_held`, as a plain loop has it.

    With ZeRO its fullest moment is a gather: flat and whole, of the last bucket of forward, or with zero=3 of two buckets of backward.
    Gradients of a bucket take the room of its weights. Where sums are not copied out, `.grad` becomes a view of its bucket when that is
    full.
    """
    own_bytes = widths.gradient * state.num_trainable
    more_gradients = (own_bytes if copies_out else min(own_bytes, state.bucket_bytes)) * (not layout.zero and layout.weight_ranks > 1)
    transient, more_buffers = state.transient, 0.0
    if layout.zero and layout.weight_ranks > 1:
        two_buckets = max(0.0, transient.gathered - transient.scattered)  # of weights: of a run and the one before
        gathered = 2 * two_buckets if layout.zero == 3 else two_buckets / 2
        more_buffers = max(transient.full, gathered) - transient.at_stage(layout_as_held(layout).zero)
    alone = memory.alone
    alone = replace(
        alone,
        gradients=alone.gradients + more_gradients,
        buffers=alone.buffers + more_buffers,
        margin=alone.margin + MARGIN * (more_gradients + more_buffers),
    )
    return replace(memory, alone=alone, transient_bytes=memory.transient_bytes + more_buffers)


def plain_loop_copied_bytes(layout: Layout, num_trainable: float, widths: Widths, copies_out: bool) -> float:
    """Return the bytes that a step's copies move. `copies_out`: sums are in memory that ranks share, and are copied to `.grad`.

    >>> from shardwise.cost.devices.devices import Widths
    >>> [plain_loop_copied_bytes(Layout(data=2, zero=zero), 100.0, Widths(4.0, 4.0, 0.0), False) for zero in (0, 1, 3)]
    [800.0, 2000.0, 3200.0]
    """
    ranks = layout.weight_ranks
    if ranks == 1:
        return 0.0
    gradients = COPY_BYTES * widths.gradient * num_trainable * (1 + copies_out * (not layout.zero))
    gathers = {0: 0, 3: 2}.get(layout.zero, 1)
    return gradients + gathers * COPY_BYTES * widths.weight * num_trainable * (1 + 1 / ranks)
