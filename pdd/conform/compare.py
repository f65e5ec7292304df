"""Arrays against arrays: the largest error and its place, in words. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_BITS: Final[dict[int, type[np.uint8] | type[np.uint16] | type[np.uint32]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class Worst:
    """``error`` is NaN where a value that must be a number is not. ``place``: index along each axis."""

    error: float
    place: tuple[int, ...]


def bits(values: np.ndarray) -> np.ndarray:
    """Bit patterns, so that NaN equals itself."""
    return values.view(_BITS[values.dtype.itemsize])


def worst_relative(got: np.ndarray, want: np.ndarray) -> Worst:
    """The largest difference over the largest wanted magnitude. Raises ValueError for unequal shapes."""
    if got.shape != want.shape:
        raise ValueError(f"worst_relative: given shapes {got.shape} and {want.shape}, must be equal")
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    scale = float(np.abs(want.astype(np.float64)).max())
    return _worst(difference / scale if scale > 0 else difference)


def worst_per_vector(got: np.ndarray, want: np.ndarray) -> Worst:
    """The largest difference of a vector [..., dim] by norm, over the wanted vector's norm; ``place`` leaves the last axis out."""
    difference = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    norm = np.linalg.norm(want, axis=-1)
    return _worst(difference / np.where(norm > 0, norm, 1.0))


def worst_absolute(got: np.ndarray, want: np.ndarray) -> Worst:
    return _worst(np.abs(got.astype(np.float64) - want))


def largest(found: Sequence[tuple[Worst, str]]) -> tuple[Worst, str]:
    """The worst of several, each with where it was found; NaN counts as the largest of all."""
    return max(found, key=lambda item: math.inf if math.isnan(item[0].error) else item[0].error)


def first_unequal(got: np.ndarray, want: np.ndarray) -> tuple[int, tuple[int, ...]] | None:
    """How many bit patterns differ, and the place of the first; None when all are equal. Shapes and dtypes must be."""
    differs = bits(got) != bits(want)
    count = int(differs.sum())
    return None if count == 0 else (count, _place(int(differs.argmax()), differs.shape))


def _worst(error: np.ndarray) -> Worst:
    """NaN counts as larger than any number: argmax finds the first."""
    flat = int(error.argmax())
    return Worst(float(error.reshape(-1)[flat]), _place(flat, error.shape))


def _place(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))
