"""All workers of a launch as the coordinator sees them: channels, what each said of itself, readiness, round trips and load.

Workers whose KV could not be exchanged are refused at start, with both values named.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field

import grpc
import grpc.aio

from pdd.errors import Code, PddError
from pdd.policy.link import LinkSnapshot
from pdd.policy.routing import WorkerLoad, least_loaded
from pdd.roles import Role
from pdd.serving.worker_events import Failed
from pdd.serving.worker_stream import WorkerStream
from pdd.topology import Topology, WorkerPlace
from pddbridge.rpc.channel import open_channel
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc

INFO_TIMEOUT_S = 5.0
WATCH_INTERVAL_S = 1.0
# What two workers must agree on before any KV moves, with the name an operator knows it by.
_MUST_AGREE = (
    ("fingerprint", "fingerprint"),
    ("vocab_size", "vocabulary size"),
    ("kv_dtype", "KV dtype"),
    ("kv_bytes_per_token", "KV bytes per token"),
)

_log = logging.getLogger(__name__)


@dataclass
class PooledWorker:
    """One worker. ``num_held``: requests that hold something on it now; ``rtts_s``: latest round trips, of which the smallest counts;
    ``told_at_s``: when ``info`` came, monotonic.
    """

    place: WorkerPlace
    channel: grpc.aio.Channel
    stub: worker_pb2_grpc.WorkerStub
    info: worker_pb2.WorkerInfo
    ready: bool
    num_held: int = 0
    rtts_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    told_at_s: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def rtt_s(self) -> float:
        return min(self.rtts_s, default=0.0)

    def link_to(self, receiver: str) -> LinkSnapshot | None:
        """The link that this worker pushed most to ``receiver`` over, as it last told; None if it never did."""
        states = [state for state in self.info.links if state.receiver == receiver]
        if not states:
            return None
        state = max(states, key=lambda state: state.kv_bytes)
        return LinkSnapshot(
            goodput_bytes_s=state.goodput_bytes_s if state.HasField("goodput_bytes_s") else None,
            wire_bytes_s=state.wire_bytes_s if state.HasField("wire_bytes_s") else None,
            round_trip_s=state.round_trip_s if state.HasField("round_trip_s") else None,
            queued_bytes=state.queued_bytes,
            num_transfers=state.num_transfers,
            age_s=time.monotonic() - self.told_at_s,
        )

    def attach(self, timeout_s: float) -> WorkerStream:
        """A new stream; the caller opens, counts and closes it."""
        return WorkerStream(self.stub, self.info.vocab_size, timeout_s)

    def readiness(self) -> float:
        """1 or 0, for a gauge."""
        return float(self.ready)

    def note_failure(self, failure: Failed) -> None:
        """No new request goes to a worker that died, until it answers again."""
        if failure.died:
            self.ready = False


class WorkerPool:
    """Made by ``connect``; ``close`` ends its watchers and channels."""

    def __init__(self, topology: Topology, workers: tuple[PooledWorker, ...]) -> None:
        self.topology = topology
        self.workers = workers
        self._watchers = [asyncio.create_task(self._watch(worker)) for worker in workers]

    @staticmethod
    async def connect(topology: Topology, site: str, timeout_s: float = 60.0) -> WorkerPool:
        """Reach every worker from ``site``, wait until all are warmed up, and check that they fit together.

        Raises PddError: UNAVAILABLE naming the workers that did not get ready in time, INVALID_ARGUMENT when two do not fit.
        """
        opened = [(place, open_channel(a.host, a.port)) for place in topology.workers for a in [place.route(site).control]]
        results = await asyncio.gather(*(_first_info(place, channel, timeout_s) for place, channel in opened), return_exceptions=True)
        try:
            errors = [result for result in results if isinstance(result, BaseException)]
            unexpected = next((error for error in errors if not isinstance(error, PddError)), None)
            if unexpected is not None:
                raise unexpected
            if errors:
                raise PddError(Code.UNAVAILABLE, "; ".join(str(error) for error in errors))
            workers = tuple(result for result in results if isinstance(result, PooledWorker))
            check_fit([worker.info for worker in workers])
        except BaseException:
            for _, channel in opened:
                await channel.close(grace=None)
            raise
        return WorkerPool(topology, workers)

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for worker in self.workers:
            await worker.channel.close(grace=None)

    def worker(self, name: str) -> PooledWorker:
        """Raises KeyError."""
        return next(worker for worker in self.workers if worker.name == name)

    def route(self, role: Role, excluded: frozenset[str] = frozenset(), preferred: str | None = None) -> PooledWorker | None:
        """The least loaded ready worker of ``role``, ``preferred`` first; None when there is none."""
        chosen = least_loaded(self._loads(), role, excluded, preferred)
        return None if chosen is None else self.worker(chosen.name)

    def has_role(self, role: Role) -> bool:
        return any(worker.place.role == role for worker in self.workers)

    def unhealthy(self) -> tuple[str, ...]:
        """Names of workers that do not answer or do not fit any more."""
        return tuple(worker.name for worker in self.workers if not worker.ready)

    def smallest_context(self) -> PooledWorker:
        """The worker with the least room for one request."""
        return min(self.workers, key=lambda worker: worker.info.max_context_tokens)

    def _loads(self) -> list[WorkerLoad]:
        return [WorkerLoad(w.name, w.place.role, w.ready, w.num_held, max(1, w.info.max_rows)) for w in self.workers]

    async def _watch(self, worker: PooledWorker) -> None:
        """Keeps ``ready`` true to life. A worker that comes back is used again only if it still fits the others."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                info = await _ask(worker.stub, worker.rtts_s)
                if info.ready and info.epoch != worker.info.epoch:
                    check_fit([other.info for other in self.workers if other is not worker] + [info])
            except grpc.aio.AioRpcError as error:
                if worker.ready:
                    _log.warning("worker %s does not answer: %s", worker.name, error.code().name)
                worker.ready = False
            except PddError as error:
                if worker.ready:
                    _log.error("worker %s came back as another: %s", worker.name, error)
                worker.ready = False
            else:
                if not worker.ready and info.ready:
                    _log.info("worker %s is ready again, epoch %d", worker.name, info.epoch)
                worker.ready = info.ready
                if info.ready:  # one that still loads does not know itself yet
                    worker.info, worker.told_at_s = info, time.monotonic()


def check_fit(infos: list[worker_pb2.WorkerInfo]) -> None:
    """Raises PddError naming both workers and both values when two cannot exchange KV or tokens."""
    first = infos[0]
    for other in infos[1:]:
        for attribute, what in _MUST_AGREE:
            mine, theirs = getattr(first, attribute), getattr(other, attribute)
            if mine != theirs:
                raise PddError(
                    Code.INVALID_ARGUMENT,
                    f"workers do not fit together: {what} of {first.name} is {mine}, {what} of {other.name} is {theirs}",
                )


async def _first_info(place: WorkerPlace, channel: grpc.aio.Channel, timeout_s: float) -> PooledWorker:
    stub = worker_pb2_grpc.WorkerStub(channel)
    deadline = time.monotonic() + timeout_s
    rtts_s: deque[float] = deque(maxlen=16)
    state = "no answer"
    while time.monotonic() < deadline:
        try:
            info = await _ask(stub, rtts_s)
        except grpc.aio.AioRpcError as error:
            state = f"{error.code().name}: {error.details()}"
        else:
            if info.ready:
                return PooledWorker(place, channel, stub, info, ready=True, rtts_s=rtts_s)
            state = "not warmed up"
        await asyncio.sleep(0.1)
    raise PddError(Code.UNAVAILABLE, f"worker {place.name} is not ready after {timeout_s:g} s ({state})")


async def _ask(stub: worker_pb2_grpc.WorkerStub, rtts_s: deque[float]) -> worker_pb2.WorkerInfo:
    asked = time.monotonic()
    info = await stub.Info(worker_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S)
    rtts_s.append(time.monotonic() - asked)
    return info
