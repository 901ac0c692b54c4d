"""Watch over the replicas of a plain loop: weights that differ between ranks, and gradients that are not finite on one rank.

In every backward a rank sums its own gradients, bucket by bucket, before they are averaged: an infinity or NaN shows in the sum. In every
`INTERVAL`-th backward replicas compare the fingerprints of their weights (`run/recovery/fingerprints`). The environment variable
`SHARDWISE_WATCH=off` switches both off; comparisons of inputs (`run/loop/forward`) stay. Not modelled: what differs in buffers, and in
weights that are frozen or sharded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn

from shardwise.errors import RunError
from shardwise.run.recovery.fingerprints import TensorOnHost, copy_to_host, fingerprint_of, suspect_ranks
from shardwise.run.state.parameters import FlatGroup
from shardwise.world import private
from shardwise.world.world import Group, World

INTERVAL = 32  # backwards between comparisons of weights, and calls between comparisons of inputs
SWITCH = "SHARDWISE_WATCH"


class ReplicasDiffer(RunError):
    """Replicas of a parameter that should be equal and are not."""


class ReplicaWatch:
    """The watch of one rank over the parameters of `groups`, each with the group of ranks that hold its replicas."""

    def __init__(self, groups: Sequence[tuple[FlatGroup, Group]], parameters: Mapping[str, nn.Parameter], world: World) -> None:
        self.is_enabled = os.environ.get(SWITCH, "on").lower() not in ("off", "0", "no", "false")
        self._groups = [(list(group.views), over) for group, over in groups if not group.is_gathered]
        self._parameters, self._world = parameters, world
        self._num_backwards = 0
        self._told: set[str] = set()
        self._sums: list[tuple[torch.Tensor, Any]] = []
        self._pending: tuple[TensorOnHost, list[Any]] | None = None  # sums on their way from a GPU

    def observe_gradients(self, group: FlatGroup, bucket: Any) -> None:
        """Look at this rank's gradients in a bucket, before they are averaged."""
        if not self.is_enabled:
            return
        total = group.grad[bucket.start : bucket.stop].sum()
        if total.is_cuda:
            self._sums.append((total, bucket))  # read later, without waiting for the device
        elif not isfinite(total.item()):
            names = [name for name in bucket.names if not bool(torch.isfinite(group.views[name]).all())]
            self._warn(names[:1])

    def finish_backward(self) -> None:
        """Compare replicas, in every `INTERVAL`-th backward; every rank calls it after its gradients were averaged.

        Raises:
            ReplicasDiffer: on all ranks that hold replicas, if they differ.
        """
        if not self.is_enabled:
            return
        self._read_sums()
        if self._num_backwards % INTERVAL == 0:
            for names, over in self._groups:
                self._compare_weights(names, over)
        self._num_backwards += 1

    def _compare_weights(self, names: Sequence[str], over: Group) -> None:
        with torch.no_grad(), private.as_base_tensor():
            local = torch.stack([fingerprint_of(self._parameters[name].detach()).to(over.device) for name in names])
        by_rank = over.all_gather(local.unsqueeze(0), 0).tolist()
        for name, fingerprints in zip(names, zip(*by_rank, strict=True), strict=True):
            if len(set(fingerprints)) > 1:
                suspects = [over.ranks[i] for i in suspect_ranks([[(1, value)] for value in fingerprints])]
                listing = ", ".join(map(str, suspects))
                raise ReplicasDiffer(
                    f"parameter {name} differs between ranks ({'ranks' if len(suspects) > 1 else 'rank'} {listing}), which train replicas "
                    f"of it: something changed it on some ranks only (if shardwise.is_main: ..., a random initialization after the model "
                    f"was divided, an optimizer with other options), or a bit was flipped in memory. Do it on all ranks alike, or go on "
                    f"from the last checkpoint; {SWITCH}=off does not look"
                )

    def _read_sums(self) -> None:
        """Read the sums of an earlier backward that have come from a GPU, and send these."""
        if self._pending is not None and self._pending[0].is_there:
            sums, buckets = self._pending
            self._pending = None
            for value, bucket in zip(sums.tensor.tolist(), buckets, strict=True):
                if value - value != 0:  # infinite or NaN
                    self._warn(bucket.names)
        if self._sums and self._pending is None:
            sent = copy_to_host(torch.stack([total.double() for total, _ in self._sums]))
            self._pending = sent, [bucket for _, bucket in self._sums]
        self._sums.clear()

    def _warn(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._told]
        self._told.update(names)
        with private.as_base_tensor():
            if not new or not all(bool(torch.isfinite(p).all()) for p in self._parameters.values()):
                return  # of weights that are not finite no gradient is: told before
        which = new[0] if len(new) == 1 else f"one of {new[0]} to {new[-1]}"
        warnings.warn(
            f"the gradient of {which} is infinite or not a number on rank {self._world.rank}, before ranks average it, which makes it so "
            f"on all: look at the loss of this rank's samples. (A GradScaler skips such a step; {SWITCH}=off does not look.)",
            stacklevel=2,
        )
