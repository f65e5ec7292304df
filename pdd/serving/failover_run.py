"""What happens to a request when one of its holders is lost. Who goes on is :mod:`pdd.policy.failover`'s decision; this carries it out.

Whoever is lost, the request goes on from its log or ends with a PddError, never silently.
"""

from __future__ import annotations

from pdd.errors import Code, PddError
from pdd.policy.failover import FailoverSnapshot, HolderState, plan_failover
from pdd.serving.holders import Attach, Holder
from pdd.serving.local_run import RELAY_LOST, end_local
from pdd.serving.request_parts import RequestParts
from pdd.serving.reservation import REQUEST_ERRORS
from pdd.serving.worker_events import Failed


class FailoverRun:
    """Of one request. Every method may raise PddError: then the request is over."""

    def __init__(self, parts: RequestParts) -> None:
        self._parts = parts
        self._recomputed_on: frozenset[str] = frozenset()

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
            parts.context.background.hurry_if_late(parts)
            parts.share.relay_is_coming(False)
            parts.handoff.relay_gone()
            if parts.handoff.committed:
                return  # main was on its way to take over
        if holder is parts.main:
            parts.main = None
            parts.handoff.main_reset()
        self.fail_over(reason or f"{holder.part}_lost", message, main_died=holder.part == "main" and failure.died)

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
        later, or goes on to the end if nobody can recompute. Raises PddError UNAVAILABLE when nobody is left. Each worker is tried once,
        and one that has failed this request only where there is no other.
        """
        parts = self._parts
        excluded = self._recomputed_on
        pool = parts.context.pool
        failed_on = parts.holders.failed_on
        worker = pool.route("main", excluded | failed_on, request=parts.request) or pool.route("main", excluded, request=parts.request)
        if worker is None and not behind_relay:
            worker = pool.route("relay", excluded, request=parts.request)
        if worker is None or not parts.context.config.policy.fallback_recompute:
            if behind_relay:
                return
            raise PddError(Code.UNAVAILABLE, f"cannot go on after {len(parts.acceptor.log)} tokens: {cause}")
        self._recomputed_on = excluded | {worker.name}
        useless = [parts.main] if behind_relay else [parts.main, parts.relay, None if parts.prefill is None else parts.prefill.holder]
        for holder in useless:
            if holder is not None:
                parts.holders.drop(holder)
        log_ids: tuple[int, ...] = ()
        parts.handoff.main_reset()
        if not behind_relay:
            parts.relay = parts.prefill = parts.local_limit = None
            log_ids = tuple(parts.acceptor.log.ids)
            parts.handoff.relay_gone()
            parts.handoff.main_opened_with(log_ids)
        parts.main = parts.holders.open(worker, Attach("main", computes=True, decode=not behind_relay, log_ids=log_ids))


def _state(holder: Holder | None) -> HolderState:
    return "none" if holder is None else holder.state
