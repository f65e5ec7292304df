"""Prometheus metrics of the links between workers, as the workers' sending ends measure them: what ``Info`` said last."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdd.serving.worker_pool import WorkerPool
from pddbridge.rpc.gen import worker_pb2

_LABELS = ("worker", "receiver", "link")


class LinkCollector(Collector):
    """Gauges per sending worker, receiver and link, by the routes that this coordinator has. What was not measured yet is absent."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[GaugeMetricFamily]:
        goodput = GaugeMetricFamily("pdd:link_goodput_bytes_per_second", "KV as stored, while frames were in flight", labels=_LABELS)
        wire = GaugeMetricFamily("pdd:link_wire_bytes_per_second", "The payloads that carried it", labels=_LABELS)
        round_trip = GaugeMetricFamily("pdd:link_round_trip_seconds", "On an idle connection, smoothed", labels=_LABELS)
        queued = GaugeMetricFamily("pdd:link_queued_bytes", "KV pushed and not acknowledged", labels=_LABELS)
        ratio = GaugeMetricFamily(
            "pdd:link_coding_ratio", "KV as stored over payloads, by the codec of the latest push", labels=(*_LABELS, "codec")
        )
        workers = tuple(self._pool.workers)
        for worker in workers:
            for state in (state for receiver in workers for state in worker.links_to(receiver.place)):
                labels = (worker.name, state.receiver, state.link)
                queued.add_metric(labels, state.queued_bytes)
                for family, field in ((goodput, "goodput_bytes_s"), (wire, "wire_bytes_s"), (round_trip, "round_trip_s")):
                    if state.HasField(field):
                        family.add_metric(labels, getattr(state, field))
                ratio.add_metric((*labels, state.codec), _coding_ratio(state))
        return (goodput, wire, round_trip, queued, ratio)


def _coding_ratio(state: worker_pb2.LinkState) -> float:
    return state.kv_bytes / state.kv_wire_bytes if state.kv_wire_bytes else 1.0
