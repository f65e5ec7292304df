"""The queue at the edge: requests wait here until main has room, in turns between tenants; too many, or for too long, and some are refused.

Owns who waits and what was handed out; what is decided, and why, is :mod:`pdd.policy.admission`'s. Its bounds are the launch config's
``flow`` section, so nothing here grows without one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pdd.errors import Code, PddError
from pdd.fairness import TenantService
from pdd.flow_config import FlowConfig
from pdd.policy.admission import (
    Claims,
    MainRoom,
    QueueLimits,
    RefusalReason,
    WaitingRequest,
    claim_tokens,
    completion_rate,
    may_start,
    next_waiting,
    refuse_one,
    retry_after_s,
)
from pdd.serving.admission_metrics import AdmissionMetrics
from pdd.serving.request import GenerationRequest
from pdd.serving.worker_pool import WorkerPool

# Room also comes without anything ending here: a main worker gets ready, another coordinator's request ends.
_LOOK_AGAIN_S = 0.25
_NUM_COMPLETIONS = 64


@dataclass(eq=False)
class _Claim:
    """A request from arrival to end. ``started``: resolved when it may start; its exception is the refusal."""

    waiting: WaitingRequest
    started: asyncio.Future[None]
    asking: bool = False


def main_room(pool: WorkerPool, rows_factor: float) -> MainRoom:
    """Of the main workers that can be used now."""
    infos = [worker.info for worker in pool.workers if worker.place.role == "main" and worker.usable]
    rows = sum(int(rows_factor * max(1, info.max_rows)) for info in infos)
    return MainRoom(sum(info.num_pages * info.page_size for info in infos), rows, len(infos))


class AdmissionQueue:
    """Lives on one event loop. ``room``: of the main workers that are ready now."""

    def __init__(self, config: FlowConfig, room: Callable[[], MainRoom], registry: CollectorRegistry) -> None:
        self._config = config
        self._limits = QueueLimits(config.max_waiting_requests, config.max_waiting_tokens, config.max_wait_s)
        self._room = room
        self._service = TenantService()
        self._num_arrived = 0
        self._waiting: dict[str, _Claim] = {}  # by request id, oldest first
        self._running: dict[str, _Claim] = {}
        self._ended_at_s: deque[float] = deque(maxlen=_NUM_COMPLETIONS)  # since somebody waits
        self.metrics = AdmissionMetrics(registry, lambda: self.num_waiting, lambda: self._waiting_tokens, lambda: self.claims.tokens)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def claims(self) -> Claims:
        running = self._running.values()
        return Claims(len(running), sum(c.waiting.tokens for c in running), sum(c.asking for c in running))

    @property
    def retry_after_s(self) -> float:
        """What a client that is refused now is told."""
        rate = completion_rate(self._ended_at_s, time.monotonic())
        return retry_after_s(len(self._waiting), rate, self._config.min_retry_after_s, self._config.max_retry_after_s)

    @asynccontextmanager
    async def admitted(self, request: GenerationRequest) -> AsyncIterator[float]:
        """Enters when the request may start, with the seconds that it waited; leaving gives back what it claimed.

        Raises PddError RESOURCE_EXHAUSTED, with ``retry_after_s``, when it is refused, DEADLINE_EXCEEDED when its own time is over first.
        """
        arrived_s = time.monotonic()
        self._num_arrived += 1
        tokens = claim_tokens(len(request.prompt_ids), request.sampling.max_tokens, self._config.growth_reserve_tokens)
        waiting = WaitingRequest(self._num_arrived, request.tenant, tokens)
        claim = _Claim(waiting, asyncio.get_running_loop().create_future())
        self._waiting[request.request_id] = claim
        self._service.arrive(request.tenant)
        completed = False
        try:
            self._start_those_that_may()
            if not claim.started.done() and len(self._waiting) == 1:
                self._ended_at_s = deque((arrived_s,), maxlen=_NUM_COMPLETIONS)  # how fast main is shows only while somebody waits
            self._refuse_if_too_many()
            await self._wait(claim, request, arrived_s)
            waited_s = time.monotonic() - arrived_s
            self.metrics.wait_s.observe(waited_s)
            yield waited_s
            completed = True
        finally:
            self._waiting.pop(request.request_id, None)
            if self._running.pop(request.request_id, None) is not None and completed:
                self._ended_at_s.append(time.monotonic())
            claim.started.cancel()
            self._service.leave(request.tenant)
            self._start_those_that_may()

    def granted(self, request_id: str) -> None:
        """Main has given the request its pages, or has no part in it: the next may ask."""
        if (claim := self._running.get(request_id)) is not None and claim.asking:
            claim.asking = False
            self._start_those_that_may()

    async def _wait(self, claim: _Claim, request: GenerationRequest, arrived_s: float) -> None:
        refused_at_s = arrived_s + self._limits.max_wait_s
        ends_at_s = arrived_s + request.timeout_s
        while not claim.started.done():
            left_s = min(refused_at_s, ends_at_s) - time.monotonic()
            if left_s <= 0 and refused_at_s <= ends_at_s:
                raise self._refusal("waited", f"no room at main for {self._limits.max_wait_s:g} s")
            if left_s <= 0:
                raise PddError(Code.DEADLINE_EXCEEDED, f"not started after {request.timeout_s:g} s, for want of room at main")
            await asyncio.wait({claim.started}, timeout=min(left_s, _LOOK_AGAIN_S))
            self._start_those_that_may()
        claim.started.result()

    def _start_those_that_may(self) -> None:
        while self._waiting:
            waiting = [claim.waiting for claim in self._waiting.values() if not claim.started.done()]
            following = next_waiting(waiting, {one.tenant: self._service.of(one.tenant) for one in waiting})
            if following is None:
                return
            reason = may_start(following.tokens, self.claims, self._room())
            if reason is None:
                return
            request_id, claim = next((i, c) for i, c in self._waiting.items() if c.waiting is following)
            del self._waiting[request_id]
            self._running[request_id] = claim
            claim.asking = reason != "no_main"
            self._service.serve(following.tenant, following.tokens, 0)
            self.metrics.started.labels(reason).inc()
            claim.started.set_result(None)

    def _refuse_if_too_many(self) -> None:
        waiting = [claim.waiting for claim in self._waiting.values()]
        refusal = refuse_one(waiting, self._limits, completion_rate(self._ended_at_s, time.monotonic()))
        if refusal is not None:
            request_id, claim = next((i, c) for i, c in self._waiting.items() if c.waiting.order == refusal.order)
            del self._waiting[request_id]
            claim.started.set_exception(self._refusal(refusal.reason, refusal.text))

    def _refusal(self, reason: RefusalReason, text: str) -> PddError:
        self.metrics.refused.labels(reason).inc()
        return PddError(Code.RESOURCE_EXHAUSTED, text, retry_after_s=self.retry_after_s)

    @property
    def _waiting_tokens(self) -> int:
        return sum(claim.waiting.tokens for claim in self._waiting.values())
