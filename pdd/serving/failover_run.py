"""What happens to a request when one of its holders is lost. Who goes on is :mod:`pdd.policy.failover`'s decision; this carries it out.

Whoever is lost, the request goes on from its log or ends with a PddError, never silently.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from pdd.errors import Code, PddError
from pdd.policy.failover import FailoverSnapshot, HolderState, plan_failover
from pdd.serving.holders import Attach, Holder
from pdd.serving.local_run import RELAY_LOST, end_local
from pdd.serving.main_transfer import hurry_if_late
from pdd.serving.pooled_worker import PooledWorker
from pdd.serving.request_parts import RequestParts
from pdd.serving.reservation import REQUEST_ERRORS
from pdd.serving.worker_events import Failed


class FailoverRun:
    """Of one request. Every method may raise PddError: then the request is over."""

    def __init__(self, parts: RequestParts) -> None:
        self._parts = parts
        self._recomputed_on: frozenset[tuple[str, int, int]] = frozenset()  # see _key
        self._stranded: str | None = None

    @property
    def stranded(self) -> bool:
        """Nobody is left to go on, and somebody may come back: :meth:`outlast`."""
        return self._stranded is not None

    async def outlast(self) -> None:
        """Wait until a worker that was lost is there again, and go on there from the log. Raises PddError: UNAVAILABLE when none was within
        ``survival.return_wait_s``, DEADLINE_EXCEEDED at the request's deadline.
        """
        parts = self._parts
        cause, self._stranded = self._stranded or "", None
        survival = parts.context.config.survival
        wait_s = survival.return_wait_s
        until = time.monotonic() + min(wait_s, parts.holders.remaining_s)
        returns = parts.context.metrics.returns
        while (worker := self._next_worker(behind_relay=False)) is None:
            parts.holders.check_deadline()
            if (left_s := until - time.monotonic()) <= 0:
                returns.labels("none").inc()
                message = f"cannot go on after {len(parts.acceptor.log)} tokens, and nobody came back within {wait_s:g} s: {cause}"
                raise PddError(Code.UNAVAILABLE, message)
            with suppress(TimeoutError):  # one whose back-off is over is not announced
                async with asyncio.timeout(min(left_s, survival.watch_interval_s)):
                    await parts.context.pool.next_return()
        returns.labels("back").inc()
        self._recompute_on(worker, behind_relay=False)

    def relay_stalled(self) -> None:
        if self._parts.relay is not None:
            self.lost(self._parts.relay, Failed(Code.UNAVAILABLE, "did not seal in time", died=False))

    def lost(self, holder: Holder, failure: Failed, reason: str | None = None) -> None:
        """``holder`` has no further part in this request."""
        parts = self._parts
        parts.holders.drop(holder)
        holder.worker.note_failure(failure)
        message = f"{holder.worker.name}: {failure.message}"
        begun = len(parts.acceptor.log) > 0
        refused = failure.code is Code.RESOURCE_EXHAUSTED and holder is not parts.relay and not begun
        if failure.code in REQUEST_ERRORS or refused:
            raise PddError(failure.code, message)
        if parts.prefill is not None and holder is parts.prefill.holder:
            parts.prefill.holder = None
            if all(_state(h) != "awaiting" for h in (parts.main, parts.relay)):
                return  # its work was done
        if holder is parts.relay:
            parts.relay = None
            hurry_if_late(parts)
            parts.share.relay_is_coming(False)
            parts.handoff.relay_gone()
            if parts.handoff.committed:
                return  # main was on its way to take over
        if holder is parts.main:
            parts.main = None
            parts.handoff.main_reset()
        self.fail_over(reason or f"{holder.worker.place.role}_lost", message, main_died=holder.part == "main" and failure.died)

    def fail_over(self, reason: str, cause: str, main_died: bool) -> None:
        """Somebody is missing: those that are left go on, or another takes its place."""
        parts = self._parts
        parts.count_fallback(reason, cause)
        if parts.awaits_shared:
            self.open_main()
            return
        if parts.local_limit is not None and parts.relay is None:
            self.leave_local(RELAY_LOST)
            return
        log_ids = parts.acceptor.log.ids
        sends = parts.prefill is not None and parts.prefill.sends
        snapshot = FailoverSnapshot(_state(parts.main), _state(parts.relay), sends)
        plan = plan_failover(snapshot, main_died)
        if plan.source == "relay":
            if parts.handoff.relay_sealed and parts.relay is not None:
                parts.handoff.resume_relay(parts.relay, log_ids)
            if plan.recompute:
                self.recompute(behind_relay=True, cause=cause)
        elif plan.source == "main" and parts.main is not None:
            parts.handoff.commit_now(parts.main, log_ids)
        else:
            self.recompute(behind_relay=False, cause=cause)

    def leave_local(self, why: str) -> None:
        """Main joins a request that was to be finished on the relay: behind it, or alone from the log once its KV has come."""
        parts = self._parts
        end_local(parts, why)
        if parts.relay is None and parts.prefill is not None and parts.prefill.holder is not None:
            parts.holders.release(parts.prefill.holder)  # its only target is gone
            parts.prefill = None
        self.open_main()
        if parts.relay is None and parts.main is not None and not parts.handoff.committed:
            parts.handoff.commit_now(parts.main, parts.acceptor.log.ids)

    def open_main(self) -> None:
        """Main joins a request that a relay has begun."""
        parts = self._parts
        parts.awaits_shared = False
        worker = parts.context.pool.route("main", preferred=parts.share.main, request=parts.request)
        if worker is None:
            self.fail_over("main_lost", "no main worker is ready", main_died=False)
        else:
            parts.main = parts.holders.open(worker, Attach("main", computes=False, decode=False))

    def recompute(self, behind_relay: bool, cause: str) -> None:
        """Attach a worker anew in main's part; it computes the prompt's KV itself. ``behind_relay``: the relay goes on and hands over
        later, or goes on to the end if nobody can recompute. Where nobody is left, it is ``stranded`` if somebody may come back; otherwise
        raises PddError UNAVAILABLE. Each worker is tried once until it is lost and comes back; one that has failed this request only where
        there is no other, and one that gets no requests for its failures only where an answer that has begun would end otherwise.
        """
        parts = self._parts
        worker = self._next_worker(behind_relay) if parts.context.config.policy.fallback_recompute else None
        if worker is not None:
            self._recompute_on(worker, behind_relay)
        elif not behind_relay:
            if not (parts.context.config.policy.fallback_recompute and parts.context.pool.may_return("main", "relay")):
                raise PddError(Code.UNAVAILABLE, f"cannot go on after {len(parts.acceptor.log)} tokens: {cause}")
            self._let_go()
            self._stranded = cause

    def _next_worker(self, behind_relay: bool) -> PooledWorker | None:
        parts = self._parts
        pool, failed_on = parts.context.pool, parts.holders.failed_on
        tried = frozenset(worker.name for worker in pool.workers if _key(worker) in self._recomputed_on)
        worker = pool.route("main", tried | failed_on, request=parts.request) or pool.route("main", tried, request=parts.request)
        if worker is None and not behind_relay:
            worker = pool.route("relay", tried, request=parts.request)
        if worker is None and not behind_relay and len(parts.acceptor.log) > 0:
            worker = pool.route("main", tried, held_back=True) or pool.route("relay", tried, held_back=True)
        return worker

    def _recompute_on(self, worker: PooledWorker, behind_relay: bool) -> None:
        parts = self._parts
        self._recomputed_on |= {_key(worker)}
        log_ids: tuple[int, ...] = ()
        if behind_relay:
            if parts.main is not None:
                parts.holders.drop(parts.main)
            parts.handoff.main_reset()
        else:
            self._let_go()
            log_ids = tuple(parts.acceptor.log.ids)
            parts.handoff.main_opened_with(log_ids)
        parts.main = parts.holders.open(worker, Attach("main", computes=True, decode=not behind_relay, log_ids=log_ids))

    def _let_go(self) -> None:
        """Of everybody: who goes on begins anew from the log."""
        parts = self._parts
        for holder in (parts.main, parts.relay, None if parts.prefill is None else parts.prefill.holder):
            if holder is not None:
                parts.holders.drop(holder)
        parts.main = parts.relay = parts.prefill = parts.local_limit = None
        parts.handoff.main_reset()
        parts.handoff.relay_gone()


def _key(worker: PooledWorker) -> tuple[str, int, int]:
    """Of a worker as it is now; another once its process has ended, or it was lost and is back."""
    return worker.name, worker.info.epoch, worker.returns


def _state(holder: Holder | None) -> HolderState:
    return "none" if holder is None else holder.state
