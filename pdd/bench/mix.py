"""Traffic mixes: who asks what, and when, as a pure function of its parameters. The same mix goes through every mode that is compared.

Agentic traffic is skewed: most requests repeat almost all of a prompt that both caches know, a few bring much that is new, and now and then
one is singular: very long in, very short out. Shares follow what has been published of such traffic (70-80 % of requests hit above 95 %,
3-4 % are singular).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["high", "low", "singular"]
KINDS: tuple[Kind, ...] = ("high", "low", "singular")


@dataclass(frozen=True)
class MixRequest:
    """``arrival_s`` after the start of the run · ``hit_tokens``: of the prompt, what a primed cache holds."""

    arrival_s: float
    kind: Kind
    prompt_ids: tuple[int, ...]
    hit_tokens: int
    output_tokens: int

    @property
    def miss_tokens(self) -> int:
        return len(self.prompt_ids) - self.hit_tokens


@dataclass(frozen=True)
class Mix:
    """``primers``: prompts that fill the caches first; requests are in order of arrival."""

    primers: tuple[tuple[int, ...], ...]
    requests: tuple[MixRequest, ...]

    @property
    def miss_tokens(self) -> int:
        return sum(request.miss_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        return self.requests[-1].arrival_s


@dataclass(frozen=True)
class SkewedMix:
    """``rate_per_s``: of Poisson arrivals · ``high_share``: of requests that miss ``high_miss`` of ``prefix_tokens`` · every
    ``singular_every``-th is singular · the others share ``low_hit`` of a known prompt and bring ``low_miss_tokens`` (from, to) anew ·
    ``output_tokens`` (from, to) of all but the singular.
    """

    num_requests: int = 60
    rate_per_s: float = 0.25
    num_sessions: int = 6
    prefix_tokens: int = 600
    high_share: float = 0.8
    high_miss: float = 0.03
    low_hit: float = 0.2
    low_miss_tokens: tuple[int, int] = (200, 400)
    singular_every: int = 30
    singular_tokens: int = 3000
    singular_output_tokens: int = 4
    output_tokens: tuple[int, int] = (650, 1050)


def skewed(params: SkewedMix, vocab_size: int, seed: int) -> Mix:
    """The same for equal arguments. Counts of kinds are exact, not drawn: a run of few requests shows the shares it says.

    Raises ValueError naming the parameter.
    """
    _check(params)
    rng = np.random.default_rng(seed)

    def ids(count: int) -> tuple[int, ...]:
        # From the upper half: no special tokens there in any vocabulary we know.
        return tuple(int(token) for token in rng.integers(vocab_size // 2, vocab_size, size=count))

    primers = tuple(ids(params.prefix_tokens) for _ in range(params.num_sessions))
    arrivals = np.cumsum(rng.exponential(1.0 / params.rate_per_s, size=params.num_requests))
    requests = []
    for index, kind in enumerate(_kinds(params, rng)):
        prefix = primers[int(rng.integers(params.num_sessions))]
        if kind == "high":
            hit, new = params.prefix_tokens, max(1, round(params.prefix_tokens * params.high_miss))
        elif kind == "low":
            hit = round(params.prefix_tokens * params.low_hit)
            new = int(rng.integers(params.low_miss_tokens[0], params.low_miss_tokens[1] + 1))
        else:
            hit, new = 0, params.singular_tokens
        low, high = params.output_tokens
        output = params.singular_output_tokens if kind == "singular" else int(rng.integers(low, high + 1))
        requests.append(MixRequest(float(arrivals[index]), kind, prefix[:hit] + ids(new), hit, output))
    return Mix(primers, tuple(requests))


def _kinds(params: SkewedMix, rng: np.random.Generator) -> list[Kind]:
    kinds: list[Kind] = ["high"] * round(params.num_requests * params.high_share)
    kinds.extend(["singular"] * (params.num_requests // params.singular_every))
    kinds.extend(["low"] * (params.num_requests - len(kinds)))
    return [kinds[int(index)] for index in rng.permutation(len(kinds))]


def _check(params: SkewedMix) -> None:
    for name, value, least in (
        ("num_requests", params.num_requests, 2),
        ("num_sessions", params.num_sessions, 1),
        ("prefix_tokens", params.prefix_tokens, 2),
        ("singular_every", params.singular_every, 1),
        ("singular_tokens", params.singular_tokens, 1),
        ("singular_output_tokens", params.singular_output_tokens, 2),
        ("output_tokens", min(params.output_tokens), 2),
        ("low_miss_tokens", min(params.low_miss_tokens), 1),
    ):
        if value < least:
            raise ValueError(f"mix: {name}: given {value}, allowed from {least} on")
    if params.rate_per_s <= 0:
        raise ValueError(f"mix: rate_per_s: given {params.rate_per_s}, allowed above 0")
    for name, share in (("high_share", params.high_share), ("high_miss", params.high_miss), ("low_hit", params.low_hit)):
        if not 0 <= share <= 1:
            raise ValueError(f"mix: {name}: given {share}, allowed 0 to 1")
    if round(params.num_requests * params.high_share) + params.num_requests // params.singular_every > params.num_requests:
        every = params.singular_every
        raise ValueError(f"mix: high_share: given {params.high_share}, with one singular in {every} that is more than all requests")
