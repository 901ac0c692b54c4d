"""Deferred initialisation: build any module on fake tensors, and materialize only the shards of a rank."""

from shardwise.capture.initialization.deferred import DeferredInit, deferred_model
from shardwise.capture.initialization.factory_losses import FactoryLosses, loss_of, materialize_loss
from shardwise.capture.initialization.materialize import materialize_module, materialize_shards, take_real_shards

__all__ = [
    "DeferredInit", "FactoryLosses", "deferred_model", "loss_of", "materialize_loss", "materialize_module", "materialize_shards",
    "take_real_shards",
]  # fmt: skip
