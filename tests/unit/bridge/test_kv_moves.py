"""The compiled routine that moves units: every size, both ways, through caches and past them; what stands in where it is missing."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from pddbridge.kv_convert import KVPool, read_blocks, write_blocks
from pddbridge.kv_layout_catalogue import GQA_LAYOUTS
from pddbridge.kv_pool import empty_on_lines
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.native import moves as native
from pddbridge.native.moves import MOVE, NativeMoves, native_moves
from pddbridge.native_build import NO_COMPILER
from tests.support.kv import bits


@pytest.fixture(scope="module")
def moves() -> NativeMoves:
    return NativeMoves(None)


@pytest.fixture(params=[1, 1 << 40], ids=["past the caches", "through them"])
def threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_STREAMED_READ_BYTES", "_STREAMED_FRESH_BYTES", "_STREAMED_WRITE_BYTES"):
        monkeypatch.setattr(native, name, request.param)


@pytest.mark.usefixtures("threshold")
@pytest.mark.parametrize("shift", [0, 1, 32], ids=["on a line", "odd", "half a line"])
@pytest.mark.parametrize("unit", [1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 6144, 20_000])
def test_units_of_any_size_go_where_they_belong_and_nothing_else_changes(moves: NativeMoves, unit: int, shift: int) -> None:
    rng = np.random.default_rng(unit)
    num_units, num, num_layers = 40, 23, 3
    pages = empty_on_lines((num_layers, num_units * unit + 128), np.dtype(np.uint8))
    pages[...] = rng.integers(0, 256, pages.shape, np.uint8)
    wire = empty_on_lines((num_layers, 2 * num * unit + 128), np.dtype(np.uint8))
    wire[...] = 7
    places = np.array([(layer.ctypes.data, layer.nbytes) for layer in pages], np.int64)
    two = [rng.permutation(num_units)[:num], rng.permutation(num_units)[:num]]
    table = np.array(
        [
            (
                *(0, num_layers, places.ctypes.data, shift, wire.ctypes.data + shift + place * num * unit, wire.shape[1]),
                *(which.ctypes.data, num, unit),
            )
            for place, which in enumerate(two)
        ],
        MOVE,
    )
    moves.make(table, 2 * num_layers * num * unit, to_wire=True)
    want = np.full_like(wire, 7)
    for layer in range(num_layers):
        units = pages[layer, shift : shift + num_units * unit].reshape(num_units, unit)
        want[layer, shift : shift + 2 * num * unit] = np.concatenate([units[which].reshape(-1) for which in two])
    assert np.array_equal(wire, want)

    wire[...] = rng.integers(0, 256, wire.shape, np.uint8)
    expected = pages.copy()
    for layer in range(num_layers):
        units = expected[layer, shift : shift + num_units * unit].reshape(num_units, unit)
        for place, which in enumerate(two):
            units[which] = wire[layer, shift + place * num * unit : shift + (place + 1) * num * unit].reshape(num, unit)
    # Units of both are in the pages' order, so the later move's stay: each is written in turns.
    only = np.setdiff1d(np.arange(num_units), np.intersect1d(*two))
    moves.make(table, 2 * num_layers * num * unit, to_wire=False)
    for layer in range(num_layers):
        got, should = (each[layer, shift : shift + num_units * unit].reshape(num_units, unit) for each in (pages, expected))
        assert np.array_equal(got[only], should[only])
    pages[:, shift : shift + num_units * unit] = expected[:, shift : shift + num_units * unit] = 0
    assert np.array_equal(pages, expected)


@pytest.mark.usefixtures("threshold")
@pytest.mark.parametrize("layout", sorted(GQA_LAYOUTS))
def test_large_conversions_are_those_of_numpy(moves: NativeMoves, layout: str) -> None:
    spec = KVSpec.gqa(3, 3, 64, "bfloat16")
    tokens, table = TokenRange(5, 390), np.random.default_rng(1).permutation(40)
    by_numpy, by_both = (KVPool.zeros(GQA_LAYOUTS[layout](16, spec.dtype), spec, 40, mover) for mover in (None, moves))
    for pool in (by_numpy, by_both):
        for layer, arrays in enumerate(pool.arrays):
            for array in arrays:
                bits(array)[...] = np.random.default_rng(layer).integers(0, 1 << 16, array.shape, np.uint16)
    want, got = read_blocks(by_numpy, table, tokens), read_blocks(by_both, table, tokens)
    assert [bits(block.values).tobytes() for block in got] == [bits(block.values).tobytes() for block in want]
    for block in want:
        bits(block.values)[...] ^= 0x5A5A
    write_blocks(by_numpy, table, want)
    write_blocks(by_both, table, want)
    for mine, theirs in zip(by_both.arrays, by_numpy.arrays, strict=True):
        assert [bits(array).tobytes() for array in mine] == [bits(array).tobytes() for array in theirs]


def test_a_machine_without_a_compiler_is_a_counted_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        assert native_moves("not there") == (None, {NO_COMPILER: 1})
    found, fallbacks = native_moves(None)
    assert found is not None
    assert fallbacks == {}
