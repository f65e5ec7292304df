"""Weights of linear maps in int8 with a scale per output: how they are rounded, so that every engine computes with the same ones. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_STEPS = 127


class RoundedWeight(NamedTuple):
    """``steps`` [out, in] int8 within ±127, ``scales`` [out] float32: a weight is its steps times its output's scale."""

    steps: np.ndarray
    scales: np.ndarray


def round_per_output(weight: np.ndarray) -> RoundedWeight:
    """``weight`` [out, in] of any float dtype in 255 steps per output, symmetric, ties to even: off by up to 1/254 of the output's largest
    weight. An output of zeros has the least normal scale. Raises ValueError for weights that are not finite.
    """
    wide = weight.astype(np.float32, copy=False)
    largest = np.abs(wide).max(axis=1)
    if not np.isfinite(largest).all():
        raise ValueError(f"compute_dtype: int8: weights of output {int(np.argmin(np.isfinite(largest)))} are not finite")
    scales = np.maximum(largest / np.float32(MOST_STEPS), np.finfo(np.float32).tiny)
    return RoundedWeight(np.rint(wide / scales[:, None]).astype(np.int8), scales)
