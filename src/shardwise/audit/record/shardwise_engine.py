"""Pages of shardwise's own engine: it computes with lowered graphs and flat buffers, so that no hook of torch sees a step."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch

from .page import Page
from .placement import LocalShard
from .private import tree_leaves
from .recorder import Recorder


def record_engine(module: Any, recorder: Recorder) -> None:
    """Replace `Engine.forward_backward` and `Engine.update` of the imported module by ones that write pages."""
    engine_class = module.Engine
    forward_backward, update = engine_class.forward_backward, engine_class.update
    pages: dict[int, Page] = {}

    @wraps(forward_backward)
    def record_forward_backward(engine: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        page = pages[id(engine)] = Page()
        _record_state(engine, page)
        if recorder.is_after_last():
            recorder.add_page(page)
            return forward_backward(engine, batch, *args, **kwargs)
        recorder.page = page
        recorder.record_inputs([t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)])
        result = forward_backward(engine, batch, *args, **kwargs)
        page.losses.append(float(engine.loss_of(result)))
        return result

    @wraps(update)
    def record_update(engine: Any, *args: Any, **kwargs: Any) -> Any:
        page = pages.pop(id(engine), None)
        shards: list[Any] = []
        if page is not None and not recorder.is_after_last():
            engine.gradients.gather()
            state = sys.modules["shardwise.run.sharded_state"]
            shards = [(s, s.tensor.detach().clone()) for s in state.gradient_shards(engine.rank_model)]
        norm = update(engine, *args, **kwargs)
        if page is not None and not recorder.is_after_last():
            limit = engine.optimizer_spec.clip
            factor = limit / (norm + 1e-6) if limit and norm is not None and norm > limit else 1.0
            for name, shard in _convert_shards(shards):
                shard.value = shard.value * factor
                page.gradients[_choose_key(page.gradients, name)] = shard
            page.optimizers.append({"kind": engine.optimizer_spec.name, "held": len(shards), "known": len(shards), "settings": []})
            recorder.add_page(page)
        return norm

    engine_class.forward_backward, engine_class.update = record_forward_backward, record_update


def _record_state(engine: Any, page: Page) -> None:
    state = [(s, s.tensor.detach().clone()) for s in engine.state_shards(drain=False) if s.kind in ("parameter", "buffer") and not s.slot]
    for kind, target in (("parameter", page.weights), ("buffer", page.buffers)):
        for name, shard in _convert_shards((s, x) for s, x in state if s.kind == kind):
            target[_choose_key(target, name)] = shard


def _choose_key(shards: dict[str, Any], name: str) -> str:
    """Return a name for one more shard of a parameter, whose shards of several blocks are held apart."""
    number = 0
    while (key := name if not number else f"{name}#{number}") in shards:
        number += 1
    return key


def _convert_shards(shards: Iterable[tuple[Any, torch.Tensor]]) -> Iterable[tuple[str, LocalShard]]:
    for shard, values in shards:
        region = shard.region
        ranges = [[(start, start + size)] for start, size in zip(region.offsets, region.shape, strict=True)]
        held = LocalShard(values.float() if values.dtype in (torch.bfloat16, torch.float16) else values, str(values.dtype))
        held.shape, held.ranges, held.flat = tuple(shard.global_shape), ranges, shard.flat
        yield shard.name, held
