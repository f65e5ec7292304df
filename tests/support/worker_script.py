"""How a scripted worker behaves: its gates, its faults, and the tokens that it proposes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pddbridge.sampling_params import SamplingParams, TokenRecord

TokenFunction = Callable[[Sequence[int], Sequence[int]], int]
VOCAB_SIZE = 300
KV_BYTES_PER_TOKEN = 100
TICK_S = 0.001


def record(params: SamplingParams, prompt_ids: Sequence[int], log_ids: Sequence[int], token: TokenFunction) -> TokenRecord:
    """What every worker proposes for position ``len(log_ids)``: a function of request and log alone."""
    chosen = token(prompt_ids, log_ids)
    if params.num_logprobs is None:
        return TokenRecord(chosen)
    logprob = -(1.0 + len(log_ids)) / 8
    top = tuple(((chosen + rank) % VOCAB_SIZE, logprob - rank) for rank in range(params.num_logprobs))
    return TokenRecord(chosen, logprob, top)


def opened(is_open: bool) -> asyncio.Event:
    event = asyncio.Event()
    if is_open:
        event.set()
    return event


@dataclass
class Script:
    """How a worker behaves. Gates are open unless a test closes them. ``hit_tokens``: what its prefix cache holds of any prompt;
    ``remembers``: it also holds prompts whose KV has been there, of the same tenant.

    ``refuse``: (code, message) of a Failed instead of Reserved · ``fail_prefill``: Failed instead of Prefilled ·
    ``break_at``: the stream breaks (as when the process dies) instead of proposing this position; only the first time ·
    ``break_ingest``: it breaks when it is given tokens · ``wrong_at``: at this position it proposes a token for the position before ·
    ``differs_at``: at these positions it chooses another token than the others would ·
    ``foreign_at``: at this position it proposes an id outside the vocabulary; only the first time ·
    ``push_fails``: what is pushed to it is refused · ``kv_event_gate``: holds its KvComplete, though the sender is acknowledged ·
    ``step_held``: whether the step that proposes a position has yet to end, however long ``step_s`` is over ·
    ``silent_at``: it owes this position and says nothing more · ``step_age_s``: what it says of its step thread · ``info_gate``: holds its
    answers of how it is, while streams go on · ``pushed_event_gate``: holds its Pushed, though the receiver has everything.
    """

    hit_tokens: int = 0
    remembers: bool = False
    max_rows: int = 8
    max_context_tokens: int = 256
    fingerprint: str = "same"
    refuse: tuple[str, str] | None = None
    fail_prefill: tuple[str, str] | None = None
    break_at: int | None = None
    break_ingest: bool = False
    wrong_at: int | None = None
    differs_at: frozenset[int] = frozenset()
    foreign_at: int | None = None
    ignore_seal: bool = False
    silent_at: int | None = None
    step_age_s: float = 0.0
    info_gate: asyncio.Event = field(default_factory=lambda: opened(True))
    step_s: float = TICK_S
    step_held: Callable[[int], bool] | None = None
    reserve_gate: asyncio.Event = field(default_factory=lambda: opened(True))
    prefill_gate: asyncio.Event = field(default_factory=lambda: opened(True))
    kv_gate: asyncio.Event = field(default_factory=lambda: opened(True))
    kv_event_gate: asyncio.Event = field(default_factory=lambda: opened(True))
    pushed_event_gate: asyncio.Event = field(default_factory=lambda: opened(True))
    push_fails: bool = False
