"""Prometheus metrics of the workers as the coordinator judges them. Read from the pool when they are asked for: workers come and go."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdd.policy.breaker import BreakerState
from pdd.serving.membership import Membership
from pdd.serving.worker_pool import WorkerPool

_BREAKER: dict[BreakerState, float] = {"closed": 0.0, "half_open": 0.5, "open": 1.0}


class WorkerCollector(Collector):
    """Gauges and counters per worker of ``pool``."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        worker_label, by_reason = ["worker"], ["worker", "reason"]
        ready = GaugeMetricFamily("pdd:worker_ready", "1 when the worker answers, fits and is warmed up", labels=worker_label)
        usable = GaugeMetricFamily("pdd:worker_usable", "1 when a new request may go there", labels=worker_label)
        draining = GaugeMetricFamily("pdd:worker_draining", "1 when it gets nothing new", labels=worker_label)
        breaker = GaugeMetricFamily("pdd:worker_breaker", "0 closed, 0.5 on trial, 1 open", labels=worker_label)
        held = GaugeMetricFamily("pdd:worker_streams", "Streams attached", labels=worker_label)
        told = GaugeMetricFamily("pdd:worker_last_answer_seconds", "Since it last said how it is", labels=worker_label)
        failures = CounterMetricFamily("pdd:worker_failures", "Streams that the worker broke", labels=worker_label)
        opened = CounterMetricFamily("pdd:worker_breaker_opened", "Times that its breaker opened", labels=worker_label)
        moved = CounterMetricFamily("pdd:worker_streams_moved", "Streams taken from it when it drained too long", labels=worker_label)
        hung = CounterMetricFamily("pdd:worker_given_up", "Times that it was given up though nothing had closed", labels=by_reason)
        chosen = CounterMetricFamily("pdd:worker_tokens_chosen", "Sampled tokens by who chose them", labels=["worker", "by"])
        fallbacks = CounterMetricFamily("pdd:worker_engine_fallbacks", "Slower paths that its engine took", labels=by_reason)
        routes = CounterMetricFamily("pdd:routes", "Choices of a worker", labels=["role", "reason"])
        now = time.monotonic()
        for worker in self._pool.workers:
            labels = (worker.name,)
            ready.add_metric(labels, float(worker.ready))
            usable.add_metric(labels, float(worker.usable))
            draining.add_metric(labels, float(worker.draining))
            breaker.add_metric(labels, _BREAKER[worker.breaker.state])
            held.add_metric(labels, worker.num_held)
            told.add_metric(labels, now - worker.told_at_s)
            failures.add_metric(labels, worker.counts.failures)
            opened.add_metric(labels, worker.counts.opened)
            moved.add_metric(labels, worker.counts.moved)
            for reason, count in worker.counts.hung.items():
                hung.add_metric((worker.name, reason), count)
            for by, count in worker.info.tokens_chosen.items():
                chosen.add_metric((worker.name, by), count)
            for reason, count in worker.info.engine_fallbacks.items():
                fallbacks.add_metric((worker.name, reason), count)
        for (role, reason), count in self._pool.num_routes.items():
            routes.add_metric((role, reason), count)
        return (ready, usable, draining, breaker, held, told, failures, opened, moved, hung, chosen, fallbacks, routes)


class LeaseCollector(Collector):
    """What is left of the leases of workers that register, and registrations by how they ended."""

    def __init__(self, membership: Membership, pool: WorkerPool) -> None:
        self._membership = membership
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        left = GaugeMetricFamily("pdd:worker_lease_seconds", "Until its lease runs out", labels=["worker"])
        registrations = CounterMetricFamily("pdd:registrations", "Registrations of workers, by verdict", labels=["verdict"])
        for worker in self._pool.workers:
            if (left_s := self._membership.lease_left_s(worker.name)) is not None:
                left.add_metric((worker.name,), left_s)
        for verdict, count in self._membership.num_by_verdict.items():
            registrations.add_metric((verdict,), count)
        return (left, registrations)
