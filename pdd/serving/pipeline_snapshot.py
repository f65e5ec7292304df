"""What the pipeline policy is told about a request: from its reservation, its workers and the link between them."""

from __future__ import annotations

from pdd.policy.pipeline import PipelineSnapshot
from pdd.serving.link_estimate import LinkEstimate
from pdd.serving.reservation import Reservation
from pdd.serving.worker_pool import WorkerPool


def pipeline_snapshot(reserved: Reservation, prompt_tokens: int, pool: WorkerPool, links: LinkEstimate) -> PipelineSnapshot:
    """At the moment when both decode workers have said what they hold of the prompt. At least one of them is there."""
    main, relay, prefill = reserved.main, reserved.relay, pool.route("prefill")
    goodput, link = None, None
    if main is not None and prefill is not None:
        goodput = links.goodput_bytes_s((prefill.place.site, main.worker.place.site))
        link = prefill.link_to(main.worker.name)
    return PipelineSnapshot(
        main_miss_tokens=prompt_tokens - 1 if main is None else main.miss_tokens(prompt_tokens),
        kv_bytes_per_token=pool.workers[0].info.kv_bytes_per_token,
        goodput_bytes_s=goodput,
        rtt_s=0.0 if main is None else main.worker.rtt_s,
        relay=reserved.relay_state,
        relay_running=0 if relay is None else relay.worker.num_held,
        relay_capacity=0 if relay is None else relay.worker.info.max_rows,
        main_available=main is not None,
        link=link,
    )
