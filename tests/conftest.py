"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# Times are not tested: a machine that has other work must not fail a test.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")
