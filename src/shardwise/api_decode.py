"""`shardwise.decoder`: parallel autoregressive decoding with a paged key-value cache, of a model or of an engine's weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardwise.api import Model, plan_for_world, subject_of
from shardwise.capture.capture import Loss
from shardwise.cluster.cluster import Cluster
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.decode.decoder import DECODE_PRICES, Decoder, Paging, build_decoder
from shardwise.run.engine import Engine
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.world.launch.current import current_world
from shardwise.world.world import World


def decoder(  # noqa: PLR0913
    model: Model | Engine,
    batch: Any = None,
    *,
    longest: int,
    loss: Loss | None = None,
    plan: Plan | Layout | str | None = None,
    cluster: Cluster | str = "here",
    seed: int = 0,
    paging: Paging | None = None,
    world: World | None = None,
) -> Decoder:
    """Build a decoder: the model sharded over the ranks of a plan, with weights and key-value cache. Every rank calls it.

    Args:
        model, batch, loss, plan, cluster: as for `parallelize`. For an engine, whose current weights are used, only `batch`.
        longest: most tokens of a sequence, prompt included. paging: pages of the key-value cache, and tokens a step.
        seed: of the initial weights, where the model is a function that builds it.

    Raises:
        Infeasible: a layout that shards sequences, or optimizer state, which a decoder does not have.

    >>> import torch, shardwise
    >>> decoder = shardwise.decoder("gpt-tiny", 1, longest=16, plan="data=1")
    >>> [len(tokens) for tokens in decoder.generate([[3, 1], [4]], 5)]
    [7, 6]
    """
    if isinstance(model, Engine):
        model.drain()
        return Decoder(model.plan, model.source, batch, model.build_executors, model.world, longest, paging or Paging())
    world = world or current_world()
    subject = subject_of(model, batch, loss)
    _, make, inputs, loss = subject
    chosen = plan_for_world(subject, plan, cluster, world, 0.0, "adamw")
    torch.manual_seed(seed)
    source = replace(ModelSource.from_model(make), prices=DECODE_PRICES)
    return build_decoder(chosen, source, inputs, loss, world, seed=seed, max_length=longest, paging=paging or Paging())
