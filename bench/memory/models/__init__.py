"""Architectures that are none of shardwise's own, small enough for two processors: what `scripts/bench memory` predicts and measures.

Every file stands by itself, so that `bench/memory/models/vision.py:swin` is a MODEL of every command; `FACTORIES` names what it makes.
"""
