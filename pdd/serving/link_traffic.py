"""What this coordinator has under way on every route between sites, from the pushes that it ordered and has not heard the end of."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdd.config import LaunchConfig
from pdd.policy.link_queue import LinkQueue
from pdd.serving.holders import Holder
from pdd.serving.link_estimate import Link, LinkEstimate
from pdd.serving.worker_pool import WorkerPool
from pddbridge.link_schedule import Priority


class LinkTraffic:
    """A push counts from when it is ordered until its receiver has everything or is let go of."""

    def __init__(self, config: LaunchConfig, pool: WorkerPool, links: LinkEstimate, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._pool = pool
        self._links = links
        self._clock = clock
        self._queues: dict[Link, LinkQueue] = {}
        self._receivers: dict[Link, set[Holder]] = {}

    def ordered(self, route: Link, sender: str, receiver: Holder, num_bytes: int, priority: Priority) -> None:
        """``receiver`` is to get ``num_bytes`` of KV from the worker ``sender``. Within a site nothing is counted: nobody waits there."""
        if route[0] == route[1]:
            return
        queue = self._current(route)
        queue.add(receiver, num_bytes, priority, sender)
        self._receivers[route].add(receiver)

    def set_priority(self, route: Link, receiver: Holder, priority: Priority) -> None:
        if route[0] != route[1]:
            self._current(route).set_priority(receiver, priority)

    def ahead_bytes(self, route: Link, sender: str, num_bytes: int, priority: Priority, goodput_bytes_s: float | None) -> float:
        """Of others, before the last of ``num_bytes`` more from ``sender``, to be divided by ``goodput_bytes_s``."""
        return 0.0 if route[0] == route[1] else self._current(route).ahead_bytes(num_bytes, priority, sender, goodput_bytes_s or 0.0)

    def urgent_bytes(self, route: Link, besides: Holder | None = None) -> float:
        """Under way and not in the lowest class; ``besides``: not counted."""
        return 0.0 if route[0] == route[1] else self._current(route).remaining_bytes(background=False, besides=besides)

    def num_transfers(self, route: Link) -> int:
        """Of every class."""
        return 0 if route[0] == route[1] else len(self._current(route))

    def goodput_bytes_s(self, route: Link) -> float | None:
        """As that of the link's senders measures it who gets most; otherwise as transfers took. None while nothing is known."""
        return max(self._told(route).values(), default=self._links.goodput_bytes_s(route))

    def _told(self, route: Link) -> dict[str, float]:
        """What each sender gets, by its own measure: what all of its transfers do."""
        senders, receivers = ([worker for worker in self._pool.workers if worker.place.site == site] for site in route)
        told: dict[str, float] = {}
        for sender in senders:
            states = (state for receiver in receivers for state in sender.links_to(receiver.place))
            for state in states:
                if state.HasField("goodput_bytes_s"):
                    told[sender.name] = max(told.get(sender.name, 0.0), state.goodput_bytes_s)
        return told

    def _current(self, route: Link) -> LinkQueue:
        if route not in self._queues:
            link = self._config.link(*route)
            self._queues[route] = LinkQueue("shortest" if link is None else link.schedule)
            self._receivers[route] = set()
        queue, receivers = self._queues[route], self._receivers[route]
        # A sender that has told nothing yet is taken for one like the others, or as transfers took.
        unknown = self.goodput_bytes_s(route)
        like_others = {} if unknown is None else dict.fromkeys((worker.name for worker in self._pool.workers), unknown)
        queue.advance(self._clock(), like_others | self._told(route))
        for receiver in [r for r in receivers if r.kv_here or r.acknowledged or r.released]:
            receivers.discard(receiver)
            queue.remove(receiver)
        return queue
