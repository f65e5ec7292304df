"""Settling: what starting left in cycles is freed, what it leaves is walked by no later collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pdd.settle import settle


class Weights:
    """Part of a cycle, as modules and their hooks are."""

    def __init__(self) -> None:
        self.owner = self


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_cycles_are_freed_and_the_rest_is_out_of_the_collectors_sight() -> None:
    gc.disable()
    try:
        left, kept = weakref.ref(Weights()), Weights()
        assert left() is not None
        settle()
        assert left() is None
        assert not any(thing is kept for thing in gc.get_objects())
        assert sum(len(gc.get_objects(generation)) for generation in range(3)) < 1000 < gc.get_freeze_count()
    finally:
        gc.enable()
