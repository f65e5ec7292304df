"""The first phase of a request: ask main, and a relay where one may be used, what they hold, and have them reserve the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from pdd.errors import Code, PddError
from pdd.policy.pipeline import RelayState
from pdd.serving.holders import Attach, Holder, Holders
from pdd.serving.shared_prompts import PromptShare
from pdd.serving.worker_events import Event, Failed, Reserved
from pdd.serving.worker_pool import WorkerPool

# How long main's answer waits for the relay's, which is near and comes first unless the relay is in trouble. Nobody queues on a relay.
RELAY_GRACE_S = 0.5
# How long prefill may run ahead of main's answer. Beyond that it would hold pages for a request that main has no room for.
EARLY_LEAD_S = 0.5
# A worker that says one of these speaks of the request or of its deadline, not of itself: no other worker is tried.
REQUEST_ERRORS = frozenset({Code.INVALID_ARGUMENT, Code.DEADLINE_EXCEEDED, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED})


class EarlyStart(Protocol):
    """Work for the relay that does not depend on main's answer."""

    def begin(self, relay: Holder) -> None: ...

    def take(self, holder: Holder, event: Event) -> bool:
        """Deal with what comes of it meanwhile: whether that could be."""

    @property
    def is_over(self) -> bool:
        """The request has ended meanwhile."""

    def withdraw(self) -> None:
        """Main takes long: hold nothing meanwhile. No effect before ``begin``."""


@dataclass
class Reservation:
    """Who has reserved; main may not have yet where the request has ended. ``relay_running``, ``relay_capacity``: requests on the relay
    that was asked, before this one, and its rows · ``early``: events that came before the pipeline was chosen, in order · ``losses``:
    (part, message) of what could not be reached · ``main_decodes``: main was opened to decode by itself.
    """

    main: Holder | None = None
    relay: Holder | None = None
    relay_state: RelayState = "none"
    relay_running: int = 0
    relay_capacity: int = 0
    main_decodes: bool = False
    early: list[tuple[Holder, Event]] = field(default_factory=list)
    losses: list[tuple[str, str]] = field(default_factory=list)


async def reserve(
    pool: WorkerPool,
    holders: Holders,
    may_relay: bool,
    relay_limit: int | None,
    share: PromptShare,
    with_main: bool = True,
    early: EarlyStart | None = None,
) -> Reservation:
    """Open both at once and wait for both, or until the relay has ended the request. ``share``: who may have the prompt already; without
    ``with_main`` the relay is opened alone · ``early``: what may begin when the relay has reserved and main, a round trip away, has yet to
    say so.

    Raises PddError when main refuses the request, or at the deadline.
    """
    result = Reservation()
    relay_worker = pool.route("relay", preferred=share.relay, request=holders.request) if may_relay else None
    if relay_worker is not None:
        result.relay_running, result.relay_capacity = relay_worker.num_held, relay_worker.info.max_rows
        full = result.relay_running >= result.relay_capacity
        result.relay_state = "full" if full else "available"
        if not full:
            attach = Attach("relay", computes=False, decode=True, max_propose_tokens=relay_limit)
            result.relay = holders.open(relay_worker, attach)
    elif may_relay and pool.has_role("relay"):
        result.relay_state = "lost"
        result.losses.append(("relay", "no relay worker is ready"))
    if with_main:
        main_worker = pool.route("main", preferred=share.main, request=holders.request)
        if main_worker is None:
            result.losses.append(("main", "no main worker is ready"))
        else:
            result.main_decodes = result.relay is None
            result.main = holders.open(main_worker, Attach("main", computes=False, decode=result.main_decodes))
    grace_ends: float | None = None
    withdraw_at: float | None = None
    while _awaits(result.main) or _awaits(result.relay):
        if grace_ends is None and not _awaits(result.main):
            grace_ends = time.monotonic() + RELAY_GRACE_S
        item = await holders.next(withdraw_at if _awaits(result.main) else grace_ends)
        if item is None and _awaits(result.main):
            assert early is not None
            withdraw_at = None
            early.withdraw()
            continue
        if item is None:
            assert result.relay is not None
            holders.release(result.relay)
            result.relay, result.relay_state = None, "full"
            continue
        holder, event = item
        if isinstance(event, Reserved):
            holder.reserved = event
            if early is not None and holder is result.relay and _awaits(result.main):
                early.begin(holder)
                withdraw_at = time.monotonic() + EARLY_LEAD_S
        elif isinstance(event, Failed) and holder in (result.main, result.relay):
            _lose(result, holders, holder, event)
        elif early is not None and _awaits(result.main) and early.take(holder, event):
            if early.is_over:
                break
        else:
            result.early.append(item)
    return result


def _awaits(holder: Holder | None) -> bool:
    return holder is not None and holder.reserved is None


def _lose(result: Reservation, holders: Holders, holder: Holder, event: Failed) -> None:
    holders.drop(holder)
    holder.worker.note_failure(event)
    full = event.code is Code.RESOURCE_EXHAUSTED
    if event.code in REQUEST_ERRORS or (full and holder is result.main):
        raise PddError(event.code, f"{holder.worker.name}: {event.message}")
    if holder is result.main:
        result.main = None
    else:
        result.relay = None
        result.relay_state = "full" if full else "lost"
    if not full:
        result.losses.append((holder.part, f"{holder.worker.name}: {event.message}"))
