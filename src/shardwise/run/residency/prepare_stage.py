"""Preparation of a lowered stage as its layout chooses: activation offload, compilation, ZeRO-3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import LocalStage
from shardwise.plan.layout import Layout
from shardwise.run.residency.cheap_recompute import CheapLayer, recompute_cheap_operators
from shardwise.run.residency.compiled_runs import compile_runs
from shardwise.run.residency.host_store import HostStore, OffloadedActivations
from shardwise.run.residency.layer_modules import LayeredStage, split_by_layer
from shardwise.run.residency.recompute import RecomputedModule, merge_segments, recompute_attention, recompute_layers
from shardwise.run.residency.weight_gatherer import WeightGatherer
from shardwise.world.memory import Accounts


def prepare_stage(
    local: LocalStage, stage: int, layout: Layout, draw: DrawState, weight_gatherer: WeightGatherer, host_store: HostStore,
    memory: Accounts, waits_by_layer: bool = False,
) -> LocalStage:  # fmt: skip
    """Return the stage with the layout's `recompute` and `offload` applied, and layers that gather their sharded weights.

    `waits_by_layer`: layers may wait for weights whose gathers are deferred, in place of the whole stage.
    """
    if layout.recompute == "selective":
        local = recompute_attention(local, draw, memory)
    gathers = any(s == stage for s, _ in weight_gatherer.buckets_by_layer)
    awaits = waits_by_layer and weight_gatherer.deferred.is_enabled and layout.residency.segment == 1
    compiles, module = layout.compile == "on", local.module
    if compiles and not gathers:
        assert isinstance(module, fx.GraphModule)  # a model that is not captured is not compiled
        return replace(local, module=compile_runs(module))
    if not (layout.recomputes_layers or gathers or awaits or layout.offloads_layers):
        return local
    layered, residency = split_by_layer(local), layout.residency
    layers = list(dict.fromkeys(layered.layers[number] for number in sorted(layered.layer_numbers)))
    if layout.recomputes_layers:
        recomputed = layered.numbers_of_layers(residency.recomputed_layers(stage, layers))
        if residency.recompute.kind == "cheap":
            recompute_cheap_operators(layered, draw, memory, recomputed)
        else:
            if residency.segment > 1:  # then no layer is offloaded or gathered
                layered = merge_segments(local, layered, recomputed, residency.segment)
            recompute_layers(layered, draw, memory, recomputed)
    if residency.offload.is_partial:
        offload_layers(layered, host_store, layered.numbers_of_layers(residency.offloaded_layers(stage, layers)))
    elif layout.offloads_layers:
        numbers = sorted(layered.names)
        # Without a pipeline the last layer's backward follows at once, so it is not offloaded.
        offload_layers(layered, host_store, frozenset(numbers[: len(numbers) - (layout.num_stages == 1)]))
    for name in layered.names.values() if compiles else ():  # inside of the gathers
        setattr(layered.local.module, name, compile_runs(getattr(layered.local.module, name)))
    if gathers:
        weight_gatherer.wrap(stage, layered)
    if awaits:
        weight_gatherer.deferred.wrap(stage, layered)
    return layered.local


def offload_layers(layered: LayeredStage, host: HostStore, offloaded: Collection[int]) -> None:
    """Wrap these layers of a stage so that they offload saved activations; recomputed layers are wrapped already."""
    chain, numbers = _OffloadChain(), sorted(layered.names)
    children = {number: getattr(layered.local.module, layered.names[number]) for number in numbers}
    not_offloaded = {n for n in layered.layer_numbers - set(offloaded) if not isinstance(children[n], RecomputedModule | CheapLayer)}
    next_number = dict(pairwise(numbers))  # empty in a stage that only forwards its inputs
    for number in numbers:
        wrapped = children[number]
        if number in offloaded:
            wrapped = OffloadedLayer(wrapped, host, chain, number == min(offloaded))
        elif host.overlaps and next_number.get(number) in not_offloaded and number > min(offloaded, default=number):
            wrapped = PrefetchingLayer(wrapped, host, chain)
        setattr(layered.local.module, layered.names[number], wrapped)


class _OffloadChain:
    """The last offloaded layer that has run."""

    last: OffloadedActivations | None = None


class OffloadedLayer(nn.Module):
    """`inner`, whose saved activations are offloaded after it has run."""

    def __init__(self, inner: nn.Module, host: HostStore, chain: _OffloadChain, is_first: bool) -> None:
        super().__init__()
        self.inner, self._host, self._chain, self._is_first = inner, host, chain, is_first

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args)
        with self._host.record_saved() as activations:
            out = self.inner(*args)
        activations.previous = None if self._is_first else self._chain.last
        self._chain.last = activations
        self._host.offload(activations)
        return out


class PrefetchingLayer(nn.Module):
    """`inner`, followed by a layer that is not offloaded: after that layer's backward the next offloaded activations are loaded."""

    def __init__(self, inner: nn.Module, host: HostStore, chain: _OffloadChain) -> None:
        super().__init__()
        self.inner, self._host, self._chain = inner, host, chain

    def forward(self, *args: Any) -> Any:
        out = self.inner(*args)
        offloaded = self._chain.last  # of this microbatch, whose previous layers have just run
        differentiable = next((x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor) and x.requires_grad), None)
        if differentiable is not None:
            differentiable.register_hook(lambda gradient: self._host.prefetch(offloaded))  # type: ignore[no-untyped-call]
        return out
