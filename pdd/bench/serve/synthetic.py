"""Datasets that are made, not read: random prompts, prompts that share prefixes, and agents' sessions fitted to published figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdd.bench.serve.sessions import Session, Turn


@dataclass(frozen=True)
class Random:
    """``range_ratio``: lengths are drawn from [(1 - r) length, (1 + r) length] · ``prefix_len``: of them, the same for all, on top."""

    num_prompts: int
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0


@dataclass(frozen=True)
class SharedPrefix:
    """``num_prefixes`` prefixes, each followed by suffixes of its own, the requests in mixed order."""

    num_prompts: int
    num_prefixes: int = 10
    prefix_len: int = 256
    suffix_len: int = 256
    output_len: int = 128


@dataclass(frozen=True)
class Agents:
    """Sessions of coding agents. A session begins with ``first_tokens`` (system prompt and task); each turn adds tool results: log-normal
    with median ``added_median`` and the spread of published traces, in which a few turns carry most of what is new (P50/P90/P99 of the miss
    per request: 727 / 4,804 / 94,290 tokens of prompts around 70,000). Answers are log-normal: 79 % are under 500 tokens at full size. All
    lengths are multiplied by ``scale``, and a session ends when its context is full. ``wait_s``: median pause of tool and user.
    """

    num_sessions: int
    turns: int = 12
    scale: float = 1.0
    first_tokens: int = 20_000
    added_median: int = 727
    added_sigma: float = 1.5
    output_median: int = 200
    output_sigma: float = 1.1
    wait_s: float = 5.0
    max_context_tokens: int = 1_000_000


def random_sessions(params: Random, vocab_size: int, seed: int) -> list[Session]:
    """One turn each. Raises ValueError naming the parameter."""
    if not 0 <= params.range_ratio < 1:
        raise ValueError(f"random-range-ratio: given {params.range_ratio}, allowed 0 to below 1")
    _at_least("random-input-len", params.input_len, 1)
    _at_least("random-output-len", params.output_len, 1)
    rng = np.random.default_rng(seed)
    prefix = token_ids(rng, params.prefix_len, vocab_size)

    def length(mean: int) -> int:
        return int(rng.integers(max(1, round(mean * (1 - params.range_ratio))), round(mean * (1 + params.range_ratio)) + 1))

    return [
        Session(str(index), (Turn(prefix + token_ids(rng, length(params.input_len), vocab_size), length(params.output_len)),))
        for index in range(params.num_prompts)
    ]


def shared_prefix_sessions(params: SharedPrefix, vocab_size: int, seed: int) -> list[Session]:
    """One turn each. Raises ValueError naming the parameter."""
    _at_least("prefix-repetition-num-prefixes", params.num_prefixes, 1)
    _at_least("prefix-repetition-suffix-len", params.suffix_len, 1)
    _at_least("prefix-repetition-output-len", params.output_len, 1)
    rng = np.random.default_rng(seed)
    prefixes = [token_ids(rng, params.prefix_len, vocab_size) for _ in range(params.num_prefixes)]
    order = rng.permutation(params.num_prompts)
    return [
        Session(
            str(index),
            (Turn(prefixes[int(which) % params.num_prefixes] + token_ids(rng, params.suffix_len, vocab_size), params.output_len),),
        )
        for index, which in enumerate(order)
    ]


def agent_sessions(params: Agents, vocab_size: int, seed: int) -> list[Session]:
    """Turns that continue one another. Raises ValueError naming the parameter."""
    if params.scale <= 0:
        raise ValueError(f"length scale: given {params.scale}, allowed above 0")
    _at_least("turns", params.turns, 1)
    rng = np.random.default_rng(seed)
    system = token_ids(rng, max(1, round(params.first_tokens * params.scale / 2)), vocab_size)  # the same for all sessions of a deployment
    return [Session(str(index), _agent_turns(params, system, rng, vocab_size)) for index in range(params.num_sessions)]


def _agent_turns(params: Agents, system: tuple[int, ...], rng: np.random.Generator, vocab_size: int) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    context = 0
    for index in range(params.turns):
        output = _scaled(rng.lognormal(np.log(params.output_median), params.output_sigma), params.scale)
        if index == 0:
            new = system + token_ids(rng, max(1, round(params.first_tokens * params.scale / 2)), vocab_size)
        else:
            new = token_ids(rng, _scaled(rng.lognormal(np.log(params.added_median), params.added_sigma), params.scale), vocab_size)
        room = params.max_context_tokens - context - len(new)
        if room < 1:
            break
        output = min(output, room)
        wait_s = 0.0 if index == 0 else float(rng.lognormal(np.log(params.wait_s), 1.0))
        turns.append(Turn(new, output, index > 0, wait_s, token_ids(rng, output, vocab_size)))
        context += len(new) + output
    if not turns:
        raise ValueError(
            f"a first prompt of {2 * len(system)} tokens leaves no room for an answer in {params.max_context_tokens} tokens of context"
        )
    return tuple(turns)


def _scaled(length: float, scale: float) -> int:
    return max(1, round(length * scale))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: given {value}, allowed from {least} on")


def token_ids(rng: np.random.Generator, count: int, vocab_size: int) -> tuple[int, ...]:
    """Random ids from the upper half of the vocabulary: no special tokens there in any vocabulary we know."""
    return tuple(int(token) for token in rng.integers(vocab_size // 2, vocab_size, size=count))
