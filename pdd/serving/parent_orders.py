"""What the launcher tells a running coordinator, a line each on its stdin, and what is answered on stdout.

``reload``: the topology has changed -> ``reloaded`` · ``drain NAME`` -> ``drained`` once it holds nothing · ``list`` -> ``workers``, with a
JSON list. An order that cannot be carried out -> ``refused``, with the reason. Each answer carries the order.
"""

from __future__ import annotations

import asyncio
import json
import logging

from pdd.errors import PddError
from pdd.launch.child import report
from pdd.serving.membership import Membership
from pdd.serving.worker_pool import WorkerPool

_log = logging.getLogger(__name__)


async def obey(orders: asyncio.Queue[bytes], pool: WorkerPool, membership: Membership, join_timeout_s: float) -> None:
    """Until cancelled. Orders do not wait for each other."""
    running: set[asyncio.Task[None]] = set()
    try:
        while True:
            line = (await orders.get()).decode("utf-8", "replace").strip()
            task = asyncio.create_task(_carry_out(line, pool, membership, join_timeout_s))
            running.add(task)
            task.add_done_callback(running.discard)
    finally:
        for task in running:
            task.cancel()


async def _carry_out(line: str, pool: WorkerPool, membership: Membership, join_timeout_s: float) -> None:
    verb, _, name = line.partition(" ")
    try:
        match verb:
            case "reload":
                await membership.follow_topology(join_timeout_s)
                report("reloaded", order=line)
            case "drain":
                await membership.drain(name)
                report("drained", order=line)
            case "list":
                report("workers", order=line, workers=json.dumps(states(pool, membership)))
            case _:
                report("refused", order=line, why="not an order")
    except (PddError, OSError, ValueError) as error:
        _log.error("order %r: %s", line, error)
        report("refused", order=line, why=str(error))


def states(pool: WorkerPool, membership: Membership) -> list[dict[str, str | int | float | None]]:
    """Every worker, as ``pdd.v1.WorkerState`` names the fields."""
    return [
        {
            "name": worker.name,
            "role": worker.place.role,
            "site": worker.place.site,
            "epoch": worker.info.epoch,
            "state": worker.status,
            "reason": worker.reason,
            "num_held": worker.num_held,
            "lease_left_s": membership.lease_left_s(worker.name),
            "failures": worker.counts.failures,
        }
        for worker in pool.workers
    ]
