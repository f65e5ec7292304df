"""The compiled CRC32C: that of the package for every size, place and beginning; what stands in where it is missing."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from crc32c import crc32c

from pddbridge.native import checksum as native
from pddbridge.native.checksum import NO_FOLDING, NativeChecksum, fastest_checksum
from pddbridge.native_build import NO_COMPILER


@pytest.fixture(scope="module")
def checksum() -> NativeChecksum:
    found, fallbacks = fastest_checksum(None)
    if not isinstance(found, NativeChecksum):
        assert fallbacks == {NO_FOLDING: 1}
        pytest.skip("this processor does not multiply 512 bits without carry")
    return found


@pytest.fixture
def no_size_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_SMALLEST_BYTES", 0)


@pytest.mark.usefixtures("no_size_is_too_small")
def test_it_is_the_checksum_that_the_wire_format_names(checksum: NativeChecksum) -> None:
    assert checksum(memoryview(b"123456789")) == 0xE3069283


@pytest.mark.usefixtures("no_size_is_too_small")
def test_every_size_at_every_place_is_that_of_the_package(checksum: NativeChecksum) -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, 2 << 20, np.uint8)
    sizes = [*range(1100), *(int(size) for size in rng.integers(1100, 1 << 20, 60)), 1 << 20]
    for size in sizes:
        start, value = int(rng.integers(0, 200)), int(rng.integers(0, 1 << 32))
        data = memory[start : start + size].data
        assert checksum(data, value) == crc32c(data, value), (size, start, value)


def test_a_message_in_pieces_is_that_of_the_whole_and_every_bit_counts(checksum: NativeChecksum) -> None:
    rng = np.random.default_rng(1)
    memory = rng.integers(0, 256, (1 << 20) + 333, np.uint8)
    whole, value = checksum(memory.data), 0
    ends = sorted(int(end) for end in rng.integers(0, len(memory), 7))
    for start, stop in zip([0, *ends], [*ends, len(memory)], strict=True):
        value = checksum(memory[start:stop].data, value)
    assert value == whole == crc32c(memory.data)
    for at in rng.integers(0, len(memory), 50):
        memory[at] ^= 1 << int(at % 8)
        assert checksum(memory.data) != whole
        memory[at] ^= 1 << int(at % 8)


def test_where_it_cannot_be_the_package_stands_in_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        assert fastest_checksum("not there") == (crc32c, {NO_COMPILER: 1})
    monkeypatch.setattr(native, "load", lambda cache_dir: SimpleNamespace(pdd_crc32c_folds=lambda: 0))
    assert fastest_checksum(None) == (crc32c, {NO_FOLDING: 1})
