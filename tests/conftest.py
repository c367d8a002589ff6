"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# How long one example takes says more about the neighbours on the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
