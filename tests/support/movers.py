"""Fixture: the tests of a module run twice, conversions moved by numpy and by the compiled routine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pddbridge import kv_convert
from pddbridge.kv_pool import KVPool
from pddbridge.native.moves import NativeMoves


@pytest.fixture(scope="module", params=["numpy", "native"], autouse=True)
def moved_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Fails, not skips, where there is no compiler: the routine must be tried."""
    name: str = request.param
    native = NativeMoves(None) if name == "native" else None

    def native_of(pool: KVPool) -> NativeMoves | None:
        return native

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_convert, "native_of", native_of)
        yield name
