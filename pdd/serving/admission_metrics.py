"""Prometheus metrics of the edge: who waits, how long, who is refused, which clients were cut off."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_WAIT_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class AdmissionMetrics:
    """``num_waiting``, ``waiting_tokens``, ``claimed_tokens``: asked when they are read."""

    def __init__(
        self,
        registry: CollectorRegistry,
        num_waiting: Callable[[], int],
        waiting_tokens: Callable[[], int],
        claimed_tokens: Callable[[], int],
    ) -> None:
        r = registry
        Gauge("pdd:num_requests_waiting", "Requests that wait at the edge for room at main", registry=r).set_function(num_waiting)
        Gauge("pdd:waiting_tokens", "Prompts and reserved output of those that wait", registry=r).set_function(waiting_tokens)
        Gauge("pdd:claimed_tokens", "Prompts and reserved output of those that run", registry=r).set_function(claimed_tokens)
        self.wait_s = Histogram("pdd:request_queue_time_seconds", "Received to started", buckets=_WAIT_BUCKETS_S, registry=r)
        self.started = Counter("pdd:requests_started", "By room there was, or asking main all the same", ["reason"], registry=r)
        self.refused = Counter("pdd:requests_refused", "At the edge, before any worker heard of them", ["reason"], registry=r)
