"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# A time limit per example says something of how busy the machine is, not of the code: pytest's own timeout catches what hangs.
settings.register_profile("pdd", deadline=None)
settings.load_profile("pdd")
