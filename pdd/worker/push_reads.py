"""KV on its way from the device to the host, for receivers. Owns what is under way and its order.

A copy is started when its chunk is computed and collected once the next step has been dispatched, so a device copies chunk n while it
computes chunk n+1. Where a copy is there at once, as on a CPU, so is its event.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from pdd.errors import Code
from pdd.worker import messages as m
from pdd.worker.push_feed import PushRead
from pdd.worker.request import RequestState
from pddbridge.engine import Engine, PendingKV, start_read_kv
from pddbridge.kv_block import arrays_in, room_for

logger = logging.getLogger(__name__)


class PushReads:
    """``emit`` and ``fail`` as the executor's. Every call is made by the step thread."""

    def __init__(self, engine: Engine, emit: Callable[[str, m.Event], None], fail: Callable[[RequestState, Code, str], None]) -> None:
        self._engine = engine
        self._emit = emit
        self._fail = fail
        self._under_way: deque[tuple[RequestState, PushRead, PendingKV]] = deque()

    def start(self, request: RequestState) -> None:
        """Copy to the host what ``request``'s receivers have room for."""
        if request.push is None:
            return
        page_table = np.array(request.pages, dtype=np.int32)
        while (read := request.push.next_read(request.kv_len)) is not None:
            try:
                copy = start_read_kv(self._engine, page_table, read.tokens, self._room(read))
            except Exception as error:
                logger.exception("request %s: starting to read KV failed", request.request_id)
                self._fail(request, Code.INTERNAL, f"reading KV failed: {error}")
                return
            self._under_way.append((request, read, copy))
        while self._under_way and self._under_way[0][2].ready:
            self._deliver(*self._under_way.popleft())

    def collect(self) -> None:
        """Wait for every copy that was started, in order."""
        while self._under_way:
            self._deliver(*self._under_way.popleft())

    def forget(self, request: RequestState) -> None:
        """``request`` is over: what is still under way for it is dropped."""
        self._under_way = deque(entry for entry in self._under_way if entry[0] is not request)

    def _room(self, read: PushRead) -> tuple[np.ndarray, ...] | None:
        """Where a link would have the blocks, so that it does not copy them; None: anywhere."""
        if read.lend is None:
            return None
        spec = self._engine.kv_spec
        memory = read.lend(room_for(spec, len(read.tokens)), len(read.targets) > 1)
        return None if memory is None else arrays_in(memory, spec, len(read.tokens))

    def _deliver(self, request: RequestState, read: PushRead, copy: PendingKV) -> None:
        try:
            blocks = copy.blocks()
        except Exception as error:
            logger.exception("request %s: reading KV failed", request.request_id)
            self._fail(request, Code.INTERNAL, f"reading KV failed: {error}")
            return
        self._emit(request.request_id, m.KVRead(read.tokens, blocks, read.targets))
