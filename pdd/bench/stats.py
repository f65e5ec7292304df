"""Percentiles the way `vllm bench serve` reports them."""

from __future__ import annotations

import numpy as np

Percentiles = dict[str, float]


def percentiles(values: list[float]) -> Percentiles:
    """P50, P90, P99 by linear interpolation. Raises ValueError for no values."""
    if not values:
        raise ValueError("percentiles: no values given")
    p50, p90, p99 = np.percentile(np.asarray(values, dtype=np.float64), (50, 90, 99))
    return {"p50": round(float(p50), 4), "p90": round(float(p90), 4), "p99": round(float(p99), 4)}
