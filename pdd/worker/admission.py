"""Which request gets pages, in which order, and who loses them. Owns the queue of those that wait; pages themselves are KVMemory's."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pdd.fairness import TenantService
from pdd.worker.kv_memory import KVMemory
from pdd.worker.preemption import choose_victim
from pdd.worker.request import Phase, RequestState

logger = logging.getLogger(__name__)


class Admission:
    """``num_preemptions``: requests that lost their pages to another, so far."""

    def __init__(self, memory: KVMemory, service: TenantService) -> None:
        self.num_preemptions = 0
        self._memory = memory
        self._service = service
        self._waiting: list[RequestState] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def first(self) -> RequestState | None:
        """Who is admitted next: the oldest of the least served tenant, so a preempted one before a new one. None when nobody waits."""
        return min(self._waiting, key=lambda r: (self._service.of(r.tenant), r.order), default=None)

    def enqueue(self, request: RequestState) -> None:
        """``request`` waits for pages."""
        request.phase = Phase.WAITING
        self._waiting.append(request)

    def remove(self, request: RequestState) -> None:
        """``request`` waits no longer, if it did."""
        if request in self._waiting:
            self._waiting.remove(request)

    def admit_first(self, requests: Collection[RequestState]) -> bool:
        """Give the first one its pages and take it out of the queue; False when there are too few. Raises what the engine's page copy does.

        While others run, a page each is left for their growth: admitting to the last page would only preempt again.
        """
        headroom = sum(1 for r in requests if r.phase is Phase.ACTIVE)
        first = self.first()
        if first is None or not self._memory.admit(first, headroom, requests):
            return False
        self._waiting.remove(first)
        return True

    def grow(self, request: RequestState, num_tokens: int, requests: Collection[RequestState]) -> bool:
        """Pages for ``num_tokens``, at the cost of a younger request if need be. False: not now; ``request`` may have lost its own."""
        while not self._memory.grow(request, num_tokens):
            victim = choose_victim(request, requests)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: RequestState) -> None:
        """Take the pages away; when it comes back it recomputes from its tokens what the prefix cache has lost by then."""
        logger.warning("request %s: preempted at %d tokens of KV", request.request_id, request.kv_len)
        self.num_preemptions += 1
        self._memory.release(request)
        request.kv_len = 0
        self.enqueue(request)
