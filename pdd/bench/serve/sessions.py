"""What is sent: sessions of turns, the one form that every dataset takes. Datasets are pure functions of their parameters and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Turn:
    """``prompt_ids``: the whole prompt, or, where it ``continues``, what is added to all that was said in the session before, answers
    included · ``wait_s``: pause after the answer before it · ``answer_ids``: stands for the answer in later turns where the endpoint does
    not say which ids it made.
    """

    prompt_ids: tuple[int, ...]
    output_tokens: int
    continues: bool = False
    wait_s: float = 0.0
    answer_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Session:
    """Turns that follow one another. ``start_s`` after the start of the run; None: the arrival process decides."""

    name: str
    turns: tuple[Turn, ...]
    start_s: float | None = None


def arrivals(num: int, rate_per_s: float | None, burstiness: float, seed: int) -> list[float]:
    """Start times, ascending; a rate of None: all at once. Gaps are gamma-distributed, of mean ``1 / rate_per_s`` and shape ``burstiness``:
    1 is a Poisson process, below 1 burstier, above 1 more even. They are scaled to end at ``num / rate_per_s``, so that a run of few
    requests offers the rate it says. Raises ValueError for a rate or burstiness that is not above 0.
    """
    if rate_per_s is None:
        return [0.0] * num
    if rate_per_s <= 0 or burstiness <= 0:
        raise ValueError(f"request rate and burstiness: given {rate_per_s} and {burstiness}, allowed above 0")
    gaps = np.random.default_rng(seed).gamma(shape=burstiness, scale=1.0 / (rate_per_s * burstiness), size=num)
    times = np.cumsum(gaps)
    return [float(time) for time in times * (num / rate_per_s / times[-1])]


def with_arrivals(sessions: list[Session], times: list[float]) -> list[Session]:
    """Sessions without a start of their own get ``times`` in order."""
    free = iter(times)
    return [session if session.start_s is not None else replace(session, start_s=next(free)) for session in sessions]


def scaled_time(sessions: list[Session], factor: float) -> list[Session]:
    """All starts and waits multiplied by ``factor``: 0.1 replays ten times as fast. Raises ValueError unless it is above 0."""
    if factor <= 0:
        raise ValueError(f"time scale: given {factor}, allowed above 0")

    def one(session: Session) -> Session:
        turns = tuple(replace(turn, wait_s=turn.wait_s * factor) for turn in session.turns)
        return replace(session, turns=turns, start_s=None if session.start_s is None else session.start_s * factor)

    return [one(session) for session in sessions]


def num_requests(sessions: Sequence[Session]) -> int:
    return sum(len(session.turns) for session in sessions)
