"""The float32 oracle (:mod:`pddtorch.oracle`), loaded by name, and how far it is from a token that someone chose."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from pddbridge.sampling import adjust_logits, sample, uniform
from pddbridge.sampling_params import SamplingParams


class OraclePass(Protocol):
    """See :class:`pddtorch.oracle.OraclePass`."""

    @property
    def logits(self) -> np.ndarray: ...
    @property
    def keys(self) -> tuple[np.ndarray, ...]: ...
    @property
    def values(self) -> tuple[np.ndarray, ...]: ...


@dataclass(frozen=True)
class Oracle:
    """The model of ``model_dir``: what both sides should be."""

    model_dir: Path

    def run(self, ids: Sequence[int]) -> OraclePass:
        """One pass over ``ids``: float32 logits [T, vocab] and the KV of every layer. The latest are kept: both sides ask for the same."""
        return _run(self.model_dir, tuple(ids))


@lru_cache(maxsize=6)
def _run(model_dir: Path, ids: tuple[int, ...]) -> OraclePass:
    passed: OraclePass = importlib.import_module("pddtorch.oracle").run(model_dir, ids)
    return passed


@dataclass(frozen=True)
class Verdict:
    """Of one token: the oracle's own ``choice`` there, its ``top2_gap``, and the token's ``margin`` (see :func:`verdict`)."""

    choice: int
    top2_gap: float
    margin: float


def verdicts(oracle: Oracle, prompt_ids: Sequence[int], log_ids: Sequence[int], params: SamplingParams) -> list[Verdict]:
    """One per token of ``log_ids``, each with the tokens before it as given."""
    logits = oracle.run([*prompt_ids, *log_ids][:-1]).logits[len(prompt_ids) - 1 :]
    given = enumerate(zip(logits, log_ids, strict=True))
    return [verdict(row, params, prompt_ids, log_ids[:position], token) for position, (row, token) in given]


def verdict(logits: np.ndarray, params: SamplingParams, prompt_ids: Sequence[int], log_ids: Sequence[int], token: int) -> Verdict:
    """How far ``logits`` [V] float32 are from choosing ``token``: 0 where they do.

    Greedy: how far the best stands above it. Sampled (temperature and penalties only; truncation has no such measure): let every logit move
    by up to e. A cumulative probability C then moves to at most sigmoid(logit(C) + 2 e / temperature), so the token at the uniform number u
    can be any whose interval, widened so, holds u; the margin is the least 2 e, the same measure as greedy's gap.
    """
    adjusted = adjust_logits(logits, params, prompt_ids, log_ids).astype(np.float64)
    second, first = np.partition(adjusted, -2)[-2:]
    choice = sample(logits, params, prompt_ids, log_ids, len(log_ids)).token_id
    if choice == token:
        margin = 0.0
    elif params.temperature == 0.0:
        margin = float(first - adjusted[token])
    else:
        weights = np.exp((adjusted - first) / params.temperature)
        cumulative = np.concatenate(([0.0], np.cumsum(weights))) / weights.sum()
        u = _logit(uniform(params.seed, len(log_ids)))
        distance = max(_logit(cumulative[token]) - u, u - _logit(cumulative[token + 1]), 0.0)
        margin = params.temperature * distance
    return Verdict(choice, float(first - second), margin)


def _logit(p: float) -> float:
    if p <= 0.0:
        return -math.inf
    return math.inf if p >= 1.0 else math.log(p) - math.log1p(-p)
