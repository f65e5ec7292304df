"""What every process of a deployment is watched for while it serves: memory, CPU, how late its event loop is, its ledger."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

from pdd.launch.local import Deployment
from pdd.loop_lag import BOUNDS_S
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc

_LAG_METRIC = "pdd:event_loop_lag_seconds"
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class LagCounts:
    """Samples per bucket of :data:`pdd.loop_lag.BOUNDS_S` and one more."""

    counts: tuple[int, ...]

    def since(self, earlier: LagCounts) -> LagCounts:
        return LagCounts(tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True)))

    def quantile_s(self, share: float) -> float:
        """Upper bound of the bucket that holds the quantile; infinite in the last. 0 without samples."""
        wanted, seen = share * sum(self.counts), 0
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            seen += count
            if seen >= wanted:
                return bound if seen else 0.0
        return 0.0


class Watch:
    """Of one running deployment."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._processes = {name: psutil.Process(child.pid) for name, child in deployment.processes.items()}

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory per process. Raises psutil.NoSuchProcess when one is gone."""
        return {name: process.memory_info().rss for name, process in self._processes.items()}

    def cpu_shares(self, seconds: float) -> dict[str, float]:
        """Share of one core that each process takes over ``seconds`` from now on."""
        before, began_s = self._cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        after, took_s = self._cpu_seconds(), time.monotonic() - began_s
        return {name: (after[name] - before[name]) / took_s for name in after}

    def ledgers(self) -> dict[str, worker_pb2.LedgerReply]:
        """Of every worker, asked directly and not over an emulated link. Raises grpc.RpcError."""
        replies = {}
        for place in self._deployment.topology.workers:
            with grpc.insecure_channel(str(place.control)) as channel:
                replies[place.name] = worker_pb2_grpc.WorkerStub(channel).Ledger(worker_pb2.LedgerRequest(), timeout=_TIMEOUT_S)
        return replies

    def lags(self) -> dict[str, LagCounts]:
        """Since its start, of every process with an event loop that says so."""
        lags = {name: LagCounts(tuple(reply.loop_lag_counts)) for name, reply in self.ledgers().items()}
        with urllib.request.urlopen(f"{self._deployment.http_url}/metrics", timeout=_TIMEOUT_S) as response:
            lags["coordinator"] = lag_of(response.read().decode())
        return lags

    def _cpu_seconds(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}


def lag_of(metrics: str) -> LagCounts:
    """The histogram in a Prometheus page, which counts up to each bound. Raises ValueError when it is not there."""
    for family in text_string_to_metric_families(metrics):
        if family.name == _LAG_METRIC:
            up_to = [int(sample.value) for sample in family.samples if sample.name.endswith("_bucket")]
            return LagCounts(tuple(now - then for now, then in zip(up_to, [0, *up_to], strict=False)))
    raise ValueError(f"the endpoint's metrics have no {_LAG_METRIC}")


def held(reply: worker_pb2.LedgerReply) -> str:
    """What a ledger still holds, or does not add up; empty when it is idle."""
    fields = ("pinned_pages", "num_requests", "num_incoming_transfers", "num_outgoing_transfers")
    found = [f"{name} {getattr(reply, name)}" for name in fields if getattr(reply, name)]
    if reply.free_pages + reply.cached_pages + reply.pinned_pages != reply.total_pages:
        found.append(f"pages do not add up to {reply.total_pages}")
    return ", ".join(found)


def growth(series: Sequence[int]) -> float:
    """Of the last samples over the first, by medians of three so that one sample at a bad moment decides nothing."""
    first, last = sorted(series[:3]), sorted(series[-3:])
    return last[len(last) // 2] / first[len(first) // 2] - 1
