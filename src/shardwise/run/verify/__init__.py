"""Verification that a parallel run equals the serial one, with the share of the model that each axis shards."""
