"""Deferred initialisation: build any module on fake tensors, and materialize only the shards of a rank."""

from weft.capture.init.deferred import Deferred, building
from weft.capture.init.factory_losses import Losses, loss_of, realize_loss
from weft.capture.init.materialize import materialize, materialize_real, realize
from weft.capture.init.twin import fake_copy

__all__ = [
    "Deferred", "Losses", "building", "fake_copy", "loss_of", "materialize", "materialize_real", "realize", "realize_loss",
]  # fmt: skip
