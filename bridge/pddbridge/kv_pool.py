"""Paged KV as host arrays that an engine owns or lends, and the view of one plane in them. The layout's axis names decide what is where;
shapes and dtypes are only checked against them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pddbridge.kv_layout import Axis, KVLayout, StoredArray
from pddbridge.kv_spec import KV_DTYPES, KVGroup, KVSpec
from pddbridge.native.moves import NativeMoves

# Copies are of bit patterns: NaN payloads survive, and numpy's own integers need no special care.
_BITS: Final[dict[int, np.dtype[np.unsignedinteger]]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}
_CANONICAL: Final[tuple[Axis, ...]] = ("page", "slot", "head", "dim")
# A cache line. numpy puts large arrays 16 bytes into one, so that a row of 128 bytes would lie in three instead of two.
_LINE_BYTES: Final = 64


@dataclass(frozen=True)
class PlaneStorage:
    """One plane of one layer, bit patterns, without a copy. ``view`` [page, slot, head, dim]: the heads stored here, without padding ·
    ``flat`` [N]: all memory from the view's first value to its last, what else lies between them included · ``strides`` of ``view``.
    """

    view: np.ndarray
    flat: np.ndarray
    strides: tuple[int, ...]
    _units: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    def units(self, first_byte: int, unit_bytes: int) -> np.ndarray:
        """``flat`` from ``first_byte`` on as void [U] of ``unit_bytes``, whole ones, without a copy: numpy moves a void with one memmove.

        Both must be multiples of a value's size. Kept: making a view costs more than copying a page.
        """
        if (first_byte, unit_bytes) not in self._units:
            values, per_unit = self.flat[first_byte // self.flat.itemsize :], unit_bytes // self.flat.itemsize
            self._units[first_byte, unit_bytes] = values[: len(values) // per_unit * per_unit].view(np.dtype((np.void, unit_bytes)))
        return self._units[first_byte, unit_bytes]


@dataclass(frozen=True)
class LayerRun:
    """Layers ``start``, ``start`` + 1, ... of the model: ``storages`` of one plane, which have equal shapes and strides."""

    start: int
    storages: tuple[PlaneStorage, ...]

    @cached_property
    def places(self) -> np.ndarray:
        """[layers, 2] int64: the address of the first byte of ``flat``, its size in bytes."""
        return np.array([(storage.flat.ctypes.data, storage.flat.nbytes) for storage in self.storages], np.int64)


@dataclass(frozen=True)
class KVPool:
    """``arrays[layer]``: the arrays of that layer, as ``layout.arrays`` says, of any strides that are not negative (a layer may be a
    view of a larger array). Raises ValueError where they differ. ``native``: moves what goes in and out; None: numpy does.
    """

    layout: KVLayout
    spec: KVSpec
    arrays: tuple[tuple[np.ndarray, ...], ...]
    native: NativeMoves | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.layout.dtype != self.spec.dtype:
            raise ValueError(f"KVPool: layout dtype {self.layout.dtype!r} differs from spec dtype {self.spec.dtype!r}")
        if len(self.arrays) != self.spec.num_layers:
            raise ValueError(f"KVPool.arrays: given {len(self.arrays)} layers, the spec has {self.spec.num_layers}")
        for group in self.spec.groups:
            want = self.layout.arrays(self.spec, group, self.num_pages)
            for layer in range(group.first_layer, group.first_layer + group.num_layers):
                self._check_layer(layer, want)

    @staticmethod
    def zeros(layout: KVLayout, spec: KVSpec, num_pages: int, native: NativeMoves | None = None) -> KVPool:
        """A pool of fresh arrays, which lie one after the other in one piece of memory: a large one can have huge pages."""
        layers = [layout.arrays(spec, group, num_pages) for group in spec.groups for _ in range(group.num_layers)]
        sizes = [math.prod(stored.shape) * KV_DTYPES[stored.dtype].itemsize for layer in layers for stored in layer]
        places = np.cumsum([0, *(-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes)]).tolist()
        memory = on_lines(np.zeros(places[-1] + _LINE_BYTES, np.uint8))
        pieces = (memory[place : place + size] for place, size in zip(places, sizes, strict=False))
        arrays = tuple(tuple(next(pieces).view(KV_DTYPES[stored.dtype]).reshape(stored.shape) for stored in layer) for layer in layers)
        return KVPool(layout, spec, arrays, native)

    @property
    def num_pages(self) -> int:
        return int(self.arrays[0][0].shape[self.layout.axes.index("page")])

    @cached_property
    def planes(self) -> tuple[tuple[PlaneStorage, ...], ...]:
        """``planes[layer][plane]``: layer of the model, plane in the order of its group."""
        return tuple(
            self._layer_planes(group, self.layout.arrays(self.spec, group, self.num_pages), self.arrays[group.first_layer + i])
            for group in self.spec.groups
            for i in range(group.num_layers)
        )

    @cached_property
    def runs(self) -> tuple[tuple[LayerRun, ...], ...]:
        """Of each plane, in the order of its group, the layers that have it, cut where strides change."""
        found: list[tuple[LayerRun, ...]] = []
        for plane in range(max(map(len, self.planes))):
            storages = [(layer, planes[plane]) for layer, planes in enumerate(self.planes) if plane < len(planes)]
            # Layers in a row have the same difference to their place in the list.
            numbered = [
                (layer - place, storage.view.shape, storage.strides, layer, storage) for place, (layer, storage) in enumerate(storages)
            ]
            runs = (list(run) for _, run in groupby(numbered, key=itemgetter(0, 1, 2)))
            found.append(tuple(LayerRun(run[0][3], tuple(one[4] for one in run)) for run in runs))
        return tuple(found)

    def _layer_planes(self, group: KVGroup, want: tuple[StoredArray, ...], arrays: tuple[np.ndarray, ...]) -> tuple[PlaneStorage, ...]:
        views = {
            plane: _plane_view(self.layout, group, array, stored, which)
            for array, stored in zip(arrays, want, strict=True)
            for which, plane in enumerate(stored.planes)
        }
        return tuple(PlaneStorage(views[plane], _flat(views[plane]), views[plane].strides) for plane in range(len(group.planes)))

    def _check_layer(self, layer: int, want: tuple[StoredArray, ...]) -> None:
        given = tuple(array.shape for array in self.arrays[layer])
        shapes = tuple(stored.shape for stored in want)
        if given != shapes:
            raise ValueError(f"KVPool.arrays[{layer}]: given shapes {given}, layout {self.layout.name!r} says {shapes}")
        for array, stored in zip(self.arrays[layer], want, strict=True):
            if array.dtype != KV_DTYPES[stored.dtype]:
                raise ValueError(f"KVPool.arrays[{layer}]: given dtype {array.dtype}, the spec says {stored.dtype}")
            if min(array.strides) < 0:
                raise ValueError(f"KVPool.arrays[{layer}]: given strides {array.strides}, must not be negative")
            if self.layout.packed is not None:
                fast = self.layout.axes.index("pack")
                if array.shape[fast - 1] > 1 and array.strides[fast - 1] != self.layout.pack * array.strides[fast]:
                    raise ValueError(f"KVPool.arrays[{layer}]: given strides {array.strides}, pack must lie inside {self.layout.packed}")


def on_lines(memory: np.ndarray) -> np.ndarray:
    """``memory`` [N] bytes from its first cache line on: [N - ``_LINE_BYTES``], without a copy."""
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + len(memory) - _LINE_BYTES]


def empty_on_lines(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """``numpy.empty`` that begins on a cache line."""
    return on_lines(np.empty(math.prod(shape) * dtype.itemsize + _LINE_BYTES, np.uint8)).view(dtype).reshape(shape)


def _plane_view(layout: KVLayout, group: KVGroup, array: np.ndarray, stored: StoredArray, which: int) -> np.ndarray:
    """Plane ``which`` of those in ``array``. Every step names the axis it takes away or puts in."""
    plane = group.planes[stored.planes[which]]
    view, axes = array.view(_BITS[array.dtype.itemsize]), list(layout.axes)

    def take(name: Axis, index: int | slice, becomes: Axis | None) -> None:
        nonlocal view
        axis = axes.index(name)
        view = view[(slice(None),) * axis + (index,)]
        axes[axis : axis + 1] = [becomes] if becomes else []

    if layout.packed is not None:
        fast = axes.index("pack")
        shape = (*view.shape[: fast - 1], view.shape[fast - 1] * layout.pack, *view.shape[fast + 1 :])
        view = as_strided(view, shape, (*view.strides[: fast - 1], *view.strides[fast:]))
        del axes[fast]
    if "plane_head" in axes:
        take("plane_head", slice(which, None, len(stored.planes)), "head")
    if "plane" in axes:
        take("plane", which, None)
    if "plane_dim" in axes:
        take("plane_dim", slice(stored.first_dims[which], None), "dim")
    take("dim", slice(0, plane.head_dim), "dim")
    if "head" not in axes:
        view, axes = view[..., None], [*axes, "head"]
    take("head", slice(0, len(layout.heads_of(plane))), "head")
    return view.transpose([axes.index(name) for name in _CANONICAL])


def _flat(view: np.ndarray) -> np.ndarray:
    num_bytes = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)) + view.itemsize
    return as_strided(view, (max(0, num_bytes) // view.itemsize,), (view.itemsize,))
