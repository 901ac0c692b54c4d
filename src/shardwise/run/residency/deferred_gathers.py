"""All-gathers of updated weights (ZeRO-1 and 2) that the next step's forward overlaps: each layer waits for the buckets that it reads.

In: all-gathers that the optimizer has started, in the order of use. Out: weights, complete when a layer first reads them. Whoever reads
weights between two steps (checkpoints, evaluation, other captures) waits for all first; where tensors themselves are handed out
(`Engine.parameters`, snapshots), gathers are waited for in the update from then on. Not deferred: gathers through shared memory, which
take the cores that compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from shardwise.lower.local import LocalStage
from shardwise.run.residency.layer_modules import LayeredStage, layers_reading
from shardwise.run.state.parameters import FlatGroup
from shardwise.world.world import CollectiveWork, Group

LayerId = tuple[int, int]  # stage, number of the layer
BucketId = tuple[int, int]  # number of the group, and of the bucket in it


class DeferredGathers:
    """Pending all-gathers of one rank, by bucket, and the buckets that each layer of the training capture reads."""

    def __init__(self) -> None:
        self.is_enabled = False
        self._pending: dict[BucketId, CollectiveWork] = {}
        self._by_layer: dict[LayerId, tuple[BucketId, ...]] = {}
        self._by_layer_stages: set[int] = set()  # whose layers wait by themselves

    def enable(self, groups: Sequence[FlatGroup], stages: Mapping[int, LocalStage], names: Mapping[str, str]) -> None:
        """Defer gathers from now on. `stages`: of the training capture; `names`: of parameters, by graph value."""
        self.is_enabled = True
        bucket_of = {name: (g, k) for g, group in enumerate(groups) for k, bucket in enumerate(group.buckets) for name in bucket.names}
        read: dict[LayerId, dict[BucketId, None]] = {}
        for value, layers in layers_reading(stages).items():
            if (bucket := bucket_of.get(names.get(value, ""))) is not None:
                for layer in layers:
                    read.setdefault(layer, {})[bucket] = None
        self._by_layer = {layer: tuple(buckets) for layer, buckets in read.items()}

    def disable(self) -> None:
        """Wait for gathers in the update from now on: tensors of weights are read that this object does not see."""
        self.wait()
        self.is_enabled = False

    def add(self, bucket: BucketId, group: Group, work: CollectiveWork) -> bool:
        """Take over the wait for a bucket's gather; False if the caller is to wait."""
        if not self.is_enabled or group.shares_memory:
            return False
        self._pending[bucket] = work
        return True

    @property
    def num_pending(self) -> int:
        """Number of gathers that nobody has waited for."""
        return len(self._pending)

    def wrap(self, stage: int, layered: LayeredStage) -> None:
        """Wrap every layer of a stage that reads gathered weights, so that it waits for them."""
        for number, name in layered.names.items():
            if (stage, number) in self._by_layer:
                child = getattr(layered.local.module, name)
                setattr(layered.local.module, name, AwaitingLayer(child, self, (stage, number)))
        self._by_layer_stages.add(stage)

    def begin_stage(self, stage: int, is_own_capture: bool) -> None:
        """Wait for what no layer of the stage waits for: all buckets, if its layers do not wait or the capture is another one."""
        if not self._pending:
            return
        if not is_own_capture or stage not in self._by_layer_stages:
            self.wait()
            return
        read = {bucket for buckets in self._by_layer.values() for bucket in buckets}
        self._wait_for([bucket for bucket in self._pending if bucket not in read])

    def wait_for_layer(self, layer: LayerId) -> None:
        """Wait for the weights that a layer reads."""
        if self._pending:
            self._wait_for(self._by_layer[layer])

    def wait(self) -> None:
        """Wait for all gathers."""
        self._wait_for(tuple(self._pending))

    def _wait_for(self, buckets: Iterable[BucketId]) -> None:
        for bucket in buckets:
            if (work := self._pending.pop(bucket, None)) is not None:
                work.wait()


class AwaitingLayer(nn.Module):
    """A layer that waits for its weights before it runs."""

    def __init__(self, inner: nn.Module, gathers: DeferredGathers, layer: LayerId) -> None:
        super().__init__()
        self.inner, self._gathers, self._layer = inner, gathers, layer

    def forward(self, *args: Any) -> Any:
        self._gathers.wait_for_layer(self._layer)
        return self.inner(*args)
