"""A request that is finished on the relay: main is let go of before anything is sent to it, and brought in after all if need be."""

from __future__ import annotations

from pdd.policy.pipeline import PipelineDecision
from pdd.serving.request_parts import RequestParts

# Why main was brought in after all. Bounded: it labels a metric.
OVERRUN = "overrun"
RELAY_LOST = "relay_lost"


def begin_local(parts: RequestParts, decision: PipelineDecision) -> None:
    """Main gives back what it reserved; prefill will push to the relay alone. One that was asked for stays local however long it gets."""
    main = parts.main
    if main is not None:
        parts.timeline.wan_kv_saved_bytes = main.miss_tokens(parts.prompt_tokens) * main.worker.info.kv_bytes_per_token
        parts.holders.release(main)
        parts.main = None
    predicted = decision.predicted_output_tokens
    overrun = parts.context.config.policy.local.overrun
    parts.local_limit = float("inf") if decision.reason == "forced" or predicted is None else overrun * predicted


def end_local(parts: RequestParts, why: str) -> None:
    """Main is to be opened after all."""
    parts.local_limit = None
    parts.timeline.redecision = why
    parts.timeline.wan_kv_saved_bytes = 0
