"""What chaos tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Compiled programs, kept between runs."""
    return Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pdd")
