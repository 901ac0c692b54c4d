"""Models without memory: build any module on fake tensors, and make real only what a rank keeps."""

from weft.model.deferred.block import Deferred, building
from weft.model.deferred.losses import Losses, loss_of, realize_loss
from weft.model.deferred.materialize import materialize, materialize_real, realize
from weft.model.deferred.twin import fake_copy

__all__ = [
    "Deferred", "Losses", "building", "fake_copy", "loss_of", "materialize", "materialize_real", "realize", "realize_loss",
]  # fmt: skip
