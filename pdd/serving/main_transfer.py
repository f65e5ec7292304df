"""One request's transfer to main, where the request may end before it: put off, hurried, and what becomes of it at the end.

Those that outlive their request are :mod:`pdd.serving.background`'s.
"""

from __future__ import annotations

from pdd.serving.request_parts import RequestParts
from pddbridge.link_schedule import Priority


def hurry_if_late(parts: RequestParts) -> None:
    """Main's transfer was put off because the request was to end on the relay. Once its answer, or the time that the transfer would
    have taken, is longer than predicted, main is waited for as behind any relay. So it is when the relay is gone.
    """
    decision, prefill, main = parts.timeline.decision, parts.prefill, parts.main
    if decision is None or prefill is None or prefill.holder is None or main is None:
        return
    answer_is_over = decision.predicted_output_tokens is not None and len(parts.acceptor.log) > decision.predicted_output_tokens
    time_is_over = decision.predicted_kv_s is not None and prefill.age_s > decision.predicted_kv_s
    if answer_is_over or time_is_over or parts.relay is None:
        parts.deferred = False
        priority = Priority.URGENT if parts.relay is None else Priority.NORMAL
        prefill.holder.stream.set_priority(main.worker.name, priority)
        parts.context.traffic.set_priority(prefill.route(main), main, priority)


def request_ended(parts: RequestParts) -> None:
    """The last token was accepted: decide what becomes of main's transfer and write it into the timeline."""
    timeline, main = parts.timeline, parts.main
    if parts.local_limit is not None:
        timeline.transfer = "cut"
        timeline.transfer_reason = "" if timeline.decision is None else timeline.decision.reason
        miss_tokens = max(0, parts.prompt_tokens - 1 - timeline.main_hit_tokens)
        parts.context.background.remember(parts.request, miss_tokens, timeline.wan_kv_saved_bytes)
        return
    prefill = None if parts.prefill is None else parts.prefill.holder
    if main is None or main.computes or main.kv_here or main.reserved is None or prefill is None:
        return
    decision = parts.context.background.decide(prefill, main, parts.prompt_tokens)
    timeline.transfer = "background" if decision.complete else "stopped"
    timeline.transfer_reason = decision.reason
    parts.goes_on = decision.complete


def see_through(parts: RequestParts) -> None:
    """The transfer goes on in the background with what it needs; all else is let go of."""
    main, prefill = parts.main, None if parts.prefill is None else parts.prefill.holder
    assert main is not None
    assert prefill is not None
    if parts.relay is not None:
        parts.holders.release(parts.relay)
    parts.context.background.take_over(parts.holders, prefill, main, parts.share, parts.prompt_tokens)
