"""Recorded traffic: traces of chained block ids become prompts that share exactly the prefixes they shared when they were recorded.

Two shapes are read, JSON lines, gzip or not:

- one request per line with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``: ids of 512-token blocks, each standing
  for the block and all before it (Mooncake's traces). Arrivals are the recorded ones.
- one request per line of an agent's session with ``s`` (session), ``sub`` (sub-agent), ``t`` (s since the session began), ``input_length``,
  ``output_length``, ``think_time`` (s) and ``hash_runs``: runs [first, count] of ids of 64-token blocks, local to the session. When
  sessions begin is not in the data: the arrival process decides. Within one, a request is sent ``think_time`` after the answer before it.

Lengths are scaled by stated factors: a block of b tokens becomes one of max(1, round(b * prompts)), a prompt of n tokens becomes one of
max(1, round(n * prompts)), its last block cut or filled with tokens of its own, an answer of m tokens one of max(1, round(m * outputs)).
What does not fit the context is left out and counted.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdd.bench.serve.sessions import Session, Turn
from pdd.bench.serve.synthetic import token_ids

_CHAT_BLOCK, _AGENT_BLOCK = 512, 64


@dataclass(frozen=True)
class Scale:
    """What lengths are multiplied by. Raises ValueError unless both are above 0."""

    prompts: float
    outputs: float

    def __post_init__(self) -> None:
        if self.prompts <= 0 or self.outputs <= 0:
            raise ValueError(f"length scale: given {self.prompts} and {self.outputs}, allowed above 0")

    def __str__(self) -> str:
        return f"prompts x {self.prompts:g}, answers x {self.outputs:g}"


@dataclass(frozen=True)
class Taken:
    """Which part of a trace: ``requests`` from the beginning; or, where there are sessions, the first ``sessions`` of them (a sub-agent's
    is one) with ``turns`` each at most. None: all.
    """

    requests: int | None = None
    sessions: int | None = None
    turns: int | None = None


@dataclass(frozen=True)
class Trace:
    """``left_out``: requests that would not fit ``max_context_tokens``."""

    sessions: list[Session]
    left_out: int


def read_trace(path: Path, scale: Scale, max_context_tokens: int, vocab_size: int, taken: Taken, seed: int) -> Trace:
    """Raises ValueError, one line, for a file that is not such a trace."""
    rows = list(_rows(path, taken.requests if taken.sessions is None else None))
    if not rows:
        raise ValueError(f"trace {path}: no requests in it")
    try:
        if "hash_runs" in rows[0]:
            return _agents(_first_turns(rows, taken), scale, max_context_tokens, vocab_size, seed)
        return _chat(rows, scale, max_context_tokens, vocab_size, seed)
    except (KeyError, TypeError) as error:
        raise ValueError(f"trace {path}: neither of the shapes that are understood: {type(error).__name__} {error}") from error


def _first_turns(rows: Sequence[dict[str, object]], taken: Taken) -> list[dict[str, object]]:
    """In the order of the file."""
    turns: Counter[tuple[str, str]] = Counter()
    kept = []
    for row in rows:
        key = str(row["s"]), str(row["sub"])
        if key not in turns and taken.sessions is not None and len(turns) == taken.sessions:
            continue
        turns[key] += 1
        if taken.turns is None or turns[key] <= taken.turns:
            kept.append(row)
    return kept


def _rows(path: Path, limit: int | None) -> Iterator[dict[str, object]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number == limit:
                    return
                yield json.loads(line)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"trace {path}: {error}") from error


def _chat(rows: Sequence[dict[str, object]], scale: Scale, room: int, vocab_size: int, seed: int) -> Trace:
    sessions = []
    blocks = _Blocks("", max(1, round(_CHAT_BLOCK * scale.prompts)), vocab_size, seed)
    for index, row in enumerate(rows):
        prompt = blocks.prompt(_ints(row["hash_ids"]), _length(row["input_length"], scale.prompts), index)
        output = _length(row["output_length"], scale.outputs)
        if len(prompt) + output <= room:
            sessions.append(Session(str(index), (Turn(prompt, output),), _number(row["timestamp"]) / 1000.0))
    return Trace(sessions, len(rows) - len(sessions))


def _agents(rows: Sequence[dict[str, object]], scale: Scale, room: int, vocab_size: int, seed: int) -> Trace:
    chains: dict[tuple[str, str], list[Turn]] = {}
    spaces: dict[str, _Blocks] = {}
    kept = 0
    for index, row in enumerate(rows):
        name = str(row["s"])
        blocks = spaces.setdefault(name, _Blocks(name, max(1, round(_AGENT_BLOCK * scale.prompts)), vocab_size, seed))
        runs = row["hash_runs"]
        if not isinstance(runs, list):
            raise TypeError("hash_runs is not a list")
        ids = [first + offset for first, count in runs for offset in range(count)]
        prompt = blocks.prompt(ids, _length(row["input_length"], scale.prompts), index)
        output = _length(row["output_length"], scale.outputs)
        if len(prompt) + output <= room:
            chain = chains.setdefault((name, str(row["sub"])), [])
            chain.append(Turn(prompt, output, wait_s=_number(row["think_time"]) if chain else 0.0))
            kept += 1
    sessions = [Session("/".join(part for part in key if part), tuple(turns)) for key, turns in chains.items()]
    return Trace(sessions, len(rows) - kept)


class _Blocks:
    """Tokens for block ids: the same id in the same space gives the same tokens, whoever asks."""

    def __init__(self, space: str, block_tokens: int, vocab_size: int, seed: int) -> None:
        self._seed = [seed, *space.encode()]
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._known: dict[int, tuple[int, ...]] = {}

    def prompt(self, ids: Sequence[int], length: int, request: int) -> tuple[int, ...]:
        """``length`` tokens: those of the blocks, cut, or filled up with tokens of this request's own."""
        tokens: list[int] = []
        for block in ids[: -(-length // self._block_tokens)]:
            tokens.extend(self._block(block))
        if len(tokens) < length:
            tokens.extend(token_ids(np.random.default_rng([*self._seed, 2, request]), length - len(tokens), self._vocab_size))
        return tuple(tokens[:length])

    def _block(self, block: int) -> tuple[int, ...]:
        if block not in self._known:
            self._known[block] = token_ids(np.random.default_rng([*self._seed, 1, block]), self._block_tokens, self._vocab_size)
        return self._known[block]


def _length(value: object, scale: float) -> int:
    return max(1, round(_number(value) * scale))


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"a number is expected, given {value!r}")
    return float(value)


def _ints(value: object) -> list[int]:
    if not isinstance(value, list):
        raise TypeError(f"a list is expected, given {value!r}")
    return [int(item) for item in value]
