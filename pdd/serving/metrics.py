"""Prometheus metrics of the coordinator. Names follow vLLM's, with the prefix ``pdd:``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdd.loop_lag import BOUNDS_S
from pdd.serving.request import Timeline

_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_E2E_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_ERROR_BUCKETS_S = (-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """All of a coordinator's metrics in a registry of their own; a front door exposes ``registry``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.running = Gauge("pdd:num_requests_running", "Requests in progress", registry=r)
        self.ttft_s = Histogram("pdd:time_to_first_token_seconds", "Received to first token", buckets=_TTFT_BUCKETS_S, registry=r)
        self.itl_s = Histogram("pdd:inter_token_latency_seconds", "Between two tokens of a request", buckets=_ITL_BUCKETS_S, registry=r)
        self.e2e_s = Histogram("pdd:e2e_request_latency_seconds", "Received to last token", buckets=_E2E_BUCKETS_S, registry=r)
        self.prompt_tokens = Counter("pdd:prompt_tokens", "Prompt tokens of requests that began", registry=r)
        self.generation_tokens = Counter("pdd:generation_tokens", "Tokens accepted, by who proposed them", ["origin"], registry=r)
        self.duplicate_tokens = Counter("pdd:duplicate_tokens", "Proposals that repeated an accepted token", registry=r)
        # The gap between the hit rates of prefill and main is what sends requests to the relay.
        self.cache_queries = Counter("pdd:prefix_cache_queries", "Prompt tokens looked up in prefix caches", ["role"], registry=r)
        self.cache_hits = Counter("pdd:prefix_cache_hits", "Prompt tokens found in prefix caches", ["role"], registry=r)
        self.kv_bytes = Counter("pdd:kv_transfer_bytes", "KV as stored, received, placed and checked", ["link"], registry=r)
        self.kv_wire_bytes = Counter("pdd:kv_transfer_wire_bytes", "Payloads that carried that KV, as coded", ["link"], registry=r)
        self.kv_pushes = Counter("pdd:kv_pushes", "Pushes acknowledged, by receiver and codec", ["target", "codec"], registry=r)
        self.kv_goodput = Gauge("pdd:kv_link_goodput_bytes_per_second", "Estimate per link", ["link"], registry=r)
        self.pipelines = Counter("pdd:pipeline", "Pipeline decisions", ["pipeline", "reason"], registry=r)
        self.prediction_error_s = Histogram(
            "pdd:kv_arrival_prediction_error_seconds", "Measured minus predicted arrival of main's KV", buckets=_ERROR_BUCKETS_S, registry=r
        )
        self.handoffs = Counter("pdd:handoff", "Handoffs completed, by mode and why it was chosen", ["mode", "reason"], registry=r)
        self.handoff_s = Histogram(
            "pdd:handoff_seconds", "First step of a handoff to main's first token", buckets=_ITL_BUCKETS_S, registry=r
        )
        self.handoff_gap_s = Histogram(
            "pdd:handoff_gap_seconds", "Largest gap that a reader saw in a handoff", ["mode"], buckets=_ITL_BUCKETS_S, registry=r
        )
        # main_first, covered: without a gap · bounded: a gap was left · relay_stopped, main_lost: ended otherwise
        self.overlaps = Counter("pdd:handoff_overlap", "Overlaps of relay and main decode, by how they ended", ["end"], registry=r)
        self.handoff_rewinds = Counter("pdd:handoff_rewinds", "Times main was rewound to a log it had left", registry=r)
        self.fallbacks = Counter("pdd:fallbacks", "Departures from the planned path", ["reason"], registry=r)
        self.returns = Counter("pdd:waits_for_return", "Requests that waited for any worker to come back", ["outcome"], registry=r)
        self.requests = Counter("pdd:requests", "Requests ended: stop, length, cancelled or an error code", ["outcome"], registry=r)
        self.stalled_clients = Counter("pdd:stalled_clients", "Clients cut off for taking nothing of their answer", ["door"], registry=r)
        self.loop_lag_s = Histogram("pdd:event_loop_lag_seconds", "How late a timer woke", buckets=BOUNDS_S, registry=r)

    def ended(self, outcome: str, timeline: Timeline) -> None:
        """``outcome``: "stop", "length", "cancelled" or an error code in lower case. Latencies are kept of those that finished."""
        self.requests.labels(outcome).inc()
        if timeline.handoff is not None and timeline.handoff_gap_s is not None:
            self.handoff_gap_s.labels(timeline.handoff).observe(timeline.handoff_gap_s)
        if timeline.ttft_s is not None:
            self.ttft_s.observe(timeline.ttft_s)
        if outcome in ("stop", "length") and timeline.e2e_s is not None:
            self.e2e_s.observe(timeline.e2e_s)
