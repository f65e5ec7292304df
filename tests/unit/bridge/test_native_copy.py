"""The copy past the caches: every size at every place, nothing beside it; what stands in where it is missing."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from pddbridge.native import copy as native
from pddbridge.native.copy import NativeCopy, fastest_copy, plain_copy
from pddbridge.native_build import NO_COMPILER


def test_every_size_at_every_place_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_SMALLEST_BYTES", 0)
    copy, rng = NativeCopy(None), np.random.default_rng(0)
    source = rng.integers(0, 256, 1 << 20, np.uint8)
    for size in [*range(700), *(int(size) for size in rng.integers(700, 900_000, 40))]:
        at, start = int(rng.integers(1, 130)), int(rng.integers(0, 130))
        target = np.full(size + 300, 0xA5, np.uint8)
        copy(target[at : at + size], source[start : start + size])
        assert np.array_equal(target[at : at + size], source[start : start + size]), (size, at, start)
        assert (target[:at] == 0xA5).all()
        assert (target[at + size :] == 0xA5).all()


def test_what_does_not_fit_is_refused() -> None:
    copy, whole = NativeCopy(None), np.zeros(600_000, np.uint8)
    for to, what in ((whole, whole[1:]), (whole[::2], whole[: len(whole) // 2]), (whole, whole.view(np.int8))):
        with pytest.raises(ValueError, match="copy"):
            copy(to, what)


def test_without_a_compiler_a_plain_copy_stands_in_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert fastest_copy("not there") == (plain_copy, {NO_COMPILER: 1})
    target = np.zeros(9, np.uint8)
    plain_copy(target, np.arange(9, dtype=np.uint8))
    assert target.tolist() == list(range(9))
