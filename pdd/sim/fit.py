"""From measured steps of an engine to its cost model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pdd.sim.costs import EngineCost


@dataclass(frozen=True)
class PrefillRun:
    """One prompt of ``tokens``, nothing of it cached, alone on the engine."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class DecodeRun:
    """One step of ``rows`` rows with ``context`` tokens each."""

    rows: int
    context: int
    seconds: float


def fit_cost(prefills: Sequence[PrefillRun], decodes: Sequence[DecodeRun]) -> EngineCost:
    """The cost with the least relative error, no part of it below 0. Raises ValueError for fewer than three runs of a kind."""
    if len(prefills) < 3 or len(decodes) < 3:
        raise ValueError(f"fit_cost: given {len(prefills)} and {len(decodes)} runs, at least 3 of each are needed")
    base, token, pair = _least_squares(
        np.array([[1.0, run.tokens, run.tokens**2 / 2] for run in prefills]), np.array([run.seconds for run in prefills])
    )
    step, row, context = _least_squares(
        np.array([[1.0, run.rows, run.rows * run.context] for run in decodes]), np.array([run.seconds for run in decodes])
    )
    return EngineCost(base, token, pair, step, row, context, extend_token_s=token)


def _least_squares(columns: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Coefficients that are not negative, by trying every subset of the columns: there are three."""
    scaled, ones = columns / seconds[:, None], np.ones(len(seconds))
    best: tuple[float, list[float]] | None = None
    for size in range(1, columns.shape[1] + 1):
        for subset in combinations(range(columns.shape[1]), size):
            found, *_ = np.linalg.lstsq(scaled[:, subset], ones, rcond=None)
            if np.any(found < 0):
                continue
            error = float(np.sum((scaled[:, subset] @ found - ones) ** 2))
            if best is None or error < best[0] - 1e-12:
                values = [0.0] * columns.shape[1]
                for index, value in zip(subset, found, strict=True):
                    values[index] = float(value)
                best = error, values
    assert best is not None, "one column alone always fits with a positive factor"
    return best[1]
