"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Before anything imports jax, and inherited by child processes: with libtpu installed JAX would look for a TPU and wait for its lock.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A time limit per example says something of how busy the machine is, not of the code: pytest's own timeout catches what hangs.
settings.register_profile("pdd", deadline=None)
settings.load_profile("pdd")
