"""The ledger check that every test with workers ends with: within a second nothing is held and the pages add up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pddbridge.rpc.gen import worker_pb2

FetchLedger = Callable[[], Awaitable[worker_pb2.LedgerReply]]

IDLE_WITHIN_S = 1.0
_POLL_S = 0.01
# So often it was looked at all the same: on a machine that gave us no core for a second, nobody had that second.
_LOOKS_PER_S = 50.0


def busy(reply: worker_pb2.LedgerReply) -> str | None:
    """What a ledger still holds, None when it is idle. Raises AssertionError when the pages do not add up, whatever the state."""
    total = reply.free_pages + reply.cached_pages + reply.pinned_pages
    assert total == reply.total_pages, f"free + cached + pinned = {total}, total {reply.total_pages}: {reply}"
    held = {
        "pinned_pages": reply.pinned_pages,
        "num_requests": reply.num_requests,
        "num_incoming_transfers": reply.num_incoming_transfers,
        "num_outgoing_transfers": reply.num_outgoing_transfers,
    }
    found = {name: count for name, count in held.items() if count}
    return str(found) if found else None


async def assert_idle(fetch: FetchLedger, within_s: float = IDLE_WITHIN_S) -> worker_pb2.LedgerReply:
    """Fetch until idle; returns the idle ledger. Raises AssertionError naming what is still held after ``within_s`` in which we ran."""
    deadline_s = time.monotonic() + within_s
    num_looks = 0
    while True:
        reply = await fetch()
        num_looks += 1
        held = busy(reply)
        if held is None:
            return reply
        in_time = time.monotonic() < deadline_s or num_looks < _LOOKS_PER_S * within_s
        assert in_time, f"after {within_s} s still held: {held}"
        await asyncio.sleep(_POLL_S)
