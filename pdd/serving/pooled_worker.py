"""One worker as the coordinator sees it: its channel, what it said of itself, what it holds for us, and whether it may be given more."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import grpc.aio

from pdd.errors import Code
from pdd.policy import breaker as breaking
from pdd.policy.breaker import Breaker, BreakerLimits
from pdd.policy.link import LinkSnapshot
from pdd.serving.worker_events import Event, Failed, Ingested, KvComplete, Prefilled, PromptScored, Proposed, Pushed, Sealed
from pdd.serving.worker_stream import WorkerStream
from pdd.survival_config import BreakerSettings
from pdd.topology import WorkerPlace
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc

# lost: does not answer, hangs, or does not fit any more · broken: its breaker is open
WorkerStatus = Literal["ready", "draining", "broken", "lost"]
# A worker that says one of these speaks of the request, or of having no room: no sign of a broken worker.
_NOT_ITS_FAULT = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.DEADLINE_EXCEEDED,
        Code.UNAUTHENTICATED,
        Code.PERMISSION_DENIED,
        Code.RESOURCE_EXHAUSTED,
        Code.CANCELLED,
    }
)


@dataclass
class WorkerCounts:
    """Ever. ``failures``: streams that the worker broke · ``opened``: times that its breaker opened · ``hung``: times that it was given up
    though nothing had closed, by reason · ``moved``: streams taken from it when it drained too long.
    """

    failures: int = 0
    opened: int = 0
    hung: dict[str, int] = field(default_factory=dict)
    moved: int = 0


@dataclass(eq=False)
class PooledWorker:
    """``num_held``: streams that are attached now · ``rtts_s``: latest round trips, of which the smallest counts · ``told_at_s``: when
    ``info`` came, monotonic · ``unanswered``: questions in a row · ``draining``: gets nothing new · ``reason``: of not being ready ·
    ``returns``: times that it got ready again.
    """

    place: WorkerPlace
    channel: grpc.aio.Channel
    stub: worker_pb2_grpc.WorkerStub
    info: worker_pb2.WorkerInfo
    ready: bool
    num_held: int = 0
    rtts_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    told_at_s: float = field(default_factory=time.monotonic)
    unanswered: int = 0
    draining: bool = False
    reason: str = ""
    returns: int = 0
    limits: BreakerLimits = field(default_factory=lambda: breaker_limits(BreakerSettings()))
    breaker: Breaker = field(default_factory=Breaker)
    counts: WorkerCounts = field(default_factory=WorkerCounts)
    _streams: dict[WorkerStream, bool] = field(default_factory=dict)  # whether it has done something on it
    _trial: WorkerStream | None = None

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def rtt_s(self) -> float:
        return min(self.rtts_s, default=0.0)

    def links_to(self, receiver: WorkerPlace) -> list[worker_pb2.LinkState]:
        """What this worker last told of its links to ``receiver``, but for routes to it that are not this coordinator's."""
        kv = receiver.route(self.place.site).kv
        return [state for state in self.info.links if state.receiver == receiver.name and state.address in ("", f"{kv.host}:{kv.port}")]

    def link_to(self, receiver: WorkerPlace) -> LinkSnapshot | None:
        """The link that this worker pushed most to ``receiver`` over, as it last told; None if it never did."""
        states = self.links_to(receiver)
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

    # --- may it be used

    @property
    def usable(self) -> bool:
        """Whether a new request may go there."""
        return self.status == "ready"

    @property
    def status(self) -> WorkerStatus:
        if not self.ready:
            return "lost"
        if self.draining:
            return "draining"
        return "ready" if breaking.allows(self.breaker, self.limits, time.monotonic()) else "broken"

    # --- what it holds

    def attach(self, timeout_s: float) -> WorkerStream:
        """A new stream; the caller opens it, tells ``heard`` what comes, and ``detach`` at its end."""
        stream = WorkerStream(self.stub, self.info.vocab_size, timeout_s)
        self.breaker = breaking.began(self.breaker, time.monotonic())
        if self.breaker.state == "half_open":
            self._trial = stream
        self._streams[stream] = False
        self.num_held += 1
        return stream

    def heard(self, stream: WorkerStream, event: Event) -> None:
        """Judge the worker by an event of one of its streams."""
        match event:
            case Failed(code):
                if self._streams.pop(stream, None) is not None and code not in _NOT_ITS_FAULT:
                    self._failed()
            case Prefilled() | KvComplete() | Proposed() | PromptScored() | Ingested() | Sealed() | Pushed():
                if self._streams.get(stream) is False:
                    self._streams[stream] = True
                    if self.breaker.state == "half_open":
                        self.breaker = breaking.succeeded(self.breaker)
            case _:
                return

    def detach(self, stream: WorkerStream) -> None:
        """The stream has ended. One that ended without a failure after work was done clears the worker."""
        self.num_held -= 1
        if self._streams.pop(stream, False):
            self.breaker = breaking.succeeded(self.breaker)
        elif stream is self._trial:
            self.breaker = breaking.abandoned(self.breaker, time.monotonic())
        if stream is self._trial:
            self._trial = None

    def note_failure(self, failure: Failed) -> None:
        """No new request goes to a worker that died, until it answers again."""
        if failure.died and self.ready:
            self.ready = False
            self.reason = failure.message

    def lose(self, kind: str, message: str) -> None:
        """It is given up though nothing has closed: every stream ends with a failure now, and it gets nothing new until it answers as it
        should. ``kind``: for counting.
        """
        self.ready = False
        self.reason = message
        if self._streams:
            self.counts.hung[kind] = self.counts.hung.get(kind, 0) + 1
        for stream in tuple(self._streams):
            stream.lose(Failed(Code.UNAVAILABLE, message, died=True))

    def move_all(self, message: str) -> None:
        """End what it still holds, so that the requests go on elsewhere. It is not to blame."""
        self.counts.moved += len(self._streams)
        failure = Failed(Code.UNAVAILABLE, message, died=False)
        streams, self._streams = self._streams, {}
        for stream in streams:
            stream.lose(failure)

    def drop_silent(self, silent_after_s: float) -> None:
        """End the streams on which it has owed tokens for too long."""
        for stream in [s for s in self._streams if s.silent_s >= silent_after_s]:
            self.counts.hung["silent"] = self.counts.hung.get("silent", 0) + 1
            stream.lose(Failed(Code.UNAVAILABLE, f"owes tokens and has sent none for {silent_after_s:g} s", died=False))

    def came_back(self, info: worker_pb2.WorkerInfo) -> None:
        """It answered, ready: a new process has a clean record."""
        if info.epoch != self.info.epoch:
            self.breaker = Breaker()
            self.draining = False
        if not self.ready:
            self.returns += 1
        self.draining = self.draining or info.draining
        self.info, self.told_at_s = info, time.monotonic()
        self.ready, self.reason = True, ""

    def _failed(self) -> None:
        self.counts.failures += 1
        before = self.breaker
        self.breaker = breaking.failed(before, self.limits, time.monotonic())
        if self.breaker.state == "open" and before.state != "open":
            self.counts.opened += 1


def breaker_limits(settings: BreakerSettings) -> BreakerLimits:
    return BreakerLimits(settings.failures, settings.first_s, settings.factor, settings.longest_s)
