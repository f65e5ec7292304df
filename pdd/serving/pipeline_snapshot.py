"""What the pipeline policy is told about a request: from its reservation, its workers, the link between them and what was learned."""

from __future__ import annotations

from pdd.policy.link import LinkSnapshot
from pdd.policy.pipeline import PipelineSnapshot, expected_goodput_bytes_s
from pdd.serving.learned import account
from pdd.serving.request_parts import RequestParts
from pdd.serving.reservation import Reservation
from pddbridge.link_schedule import Priority


def pipeline_snapshot(reserved: Reservation, parts: RequestParts) -> PipelineSnapshot:
    """At the moment when both decode workers have said what they hold of the prompt. At least one of them is there."""
    context, request, prompt_tokens = parts.context, parts.request, parts.prompt_tokens
    learned = context.learned
    main, relay = reserved.main, reserved.relay
    prefill = context.pool.route("prefill") if parts.prefill is None else parts.prefill.worker
    main_miss = prompt_tokens - 1 if main is None else main.miss_tokens(prompt_tokens)
    kv_bytes_per_token = context.pool.workers[0].info.kv_bytes_per_token
    goodput, link, ahead_bytes, late_s = None, None, 0.0, 0.0
    if main is not None and prefill is not None:
        route = (prefill.place.site, main.worker.place.site)
        goodput = context.links.goodput_bytes_s(route)
        link = prefill.link_to(main.worker.place)
        expected = expected_goodput_bytes_s(goodput, link or LinkSnapshot())
        ahead_bytes = context.traffic.ahead_bytes(route, prefill.name, main_miss * kv_bytes_per_token, Priority.URGENT, expected)
        late_s = learned.late_s(route)
    # Prefill holds what either has: all that they hold was computed there.
    miss = min(main_miss, main_miss if relay is None else relay.miss_tokens(prompt_tokens))
    computed_share = learned.computed.value
    return PipelineSnapshot(
        main_miss_tokens=main_miss,
        kv_bytes_per_token=kv_bytes_per_token,
        goodput_bytes_s=goodput,
        rtt_s=0.0 if main is None else main.worker.rtt_s,
        relay=reserved.relay_state,
        relay_running=reserved.relay_running,
        relay_capacity=reserved.relay_capacity,
        main_available=main is not None,
        link=link,
        prefill_tokens=round(miss * (1.0 if computed_share is None else computed_share)),
        prefill_s_per_token=None if prefill is None else learned.prefill_s_per_token(prefill.name),
        prefill_step_tokens=0 if prefill is None else prefill.info.max_step_tokens,
        relay_s_per_token=learned.relay_s.value,
        output=learned.lengths.predict(account(request.tenant), request.sampling.max_tokens),
        local_open=learned.quota.open,
        shared=parts.share.is_shared,
        ahead_bytes=ahead_bytes,
        late_s=late_s,
        relayed_tokens=len(parts.acceptor.log),
    )
