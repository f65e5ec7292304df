"""What is asked of a modelled system, and what came of it."""

from __future__ import annotations

from typing import NamedTuple

from pdd.policy.pipeline import PipelineDecision
from pdd.sim.cache import Prompt


class Request(NamedTuple):
    """``hits``: (prefill, main) tokens, where the workload states them instead of the caches · ``answer``: what the prompt with its answer
    is called in caches, None: nobody comes back to it.
    """

    tenant: str
    prompt: Prompt
    output_tokens: int
    max_tokens: int
    hits: tuple[int, int] | None = None
    answer: Prompt | None = None


class Outcome(NamedTuple):
    """Seconds from arrival. ``largest_gap_s``: between tokens, at the handoff or a decode step."""

    request: Request
    decision: PipelineDecision
    handoff: str | None
    ttft_s: float
    e2e_s: float
    largest_gap_s: float
    relay_tokens: int
    main_tokens: int
    prefill_hit: int
    main_hit: int
    kv_bytes: float
