"""Models without memory: build any module on fake tensors, and make real only what a rank keeps."""

from weft.model.deferred.block import Deferred, building
from weft.model.deferred.materialize import materialize, materialize_real, realize
from weft.model.deferred.twin import fake_copy

__all__ = ["Deferred", "building", "fake_copy", "materialize", "materialize_real", "realize"]
