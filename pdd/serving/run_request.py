"""The life of one request: reserve, choose the pipeline, prefill, relay, hand off, main, end. One task, one inbox, events in order.

Every token goes through the acceptor. Whoever is lost, the request goes on from its log or ends with a PddError, never silently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdd.config import LaunchConfig
from pdd.errors import Code, PddError
from pdd.policy.failover import FailoverSnapshot, HolderState, plan_failover
from pdd.policy.pipeline import Pipeline, PipelineDecision, choose_pipeline
from pdd.serving.acceptor import Acceptor
from pdd.serving.handoff_run import HandoffRun
from pdd.serving.holders import Attach, Holder, Holders
from pdd.serving.link_estimate import LinkEstimate
from pdd.serving.metrics import Metrics
from pdd.serving.pipeline_snapshot import pipeline_snapshot
from pdd.serving.prefill_run import PrefillRun, open_prefill
from pdd.serving.request import Delta, GenerationRequest
from pdd.serving.reservation import REQUEST_ERRORS, Reservation, reserve
from pdd.serving.shared_prompts import SHARE_WAIT_S, Entry, SharedPrompts
from pdd.serving.timeline import TimelineRecorder
from pdd.serving.token_log import TokenLogError
from pdd.serving.worker_events import (
    Event,
    Failed,
    Ingested,
    KvComplete,
    Prefilled,
    Proposed,
    Pushed,
    PushFailed,
    Reserved,
    Sealed,
    SharedAtMain,
)
from pdd.serving.worker_pool import WorkerPool

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunContext:
    """What all requests of a coordinator share."""

    config: LaunchConfig
    pool: WorkerPool
    links: LinkEstimate
    metrics: Metrics
    prompts: SharedPrompts


class RequestRun:
    """``run`` once. Deltas go to ``emit`` as they are accepted; the last one carries the finish reason and the timeline."""

    def __init__(
        self, request: GenerationRequest, context: RunContext, acceptor: Acceptor, timeline: TimelineRecorder, emit: Callable[[Delta], None]
    ) -> None:
        self._request = request
        self._config = context.config
        self._pool = context.pool
        self._links = context.links
        self._metrics = context.metrics
        self._acceptor = acceptor
        self._timeline = timeline
        self._emit = emit
        policy = context.config.policy
        wish = request.override
        self._relay_limit = wish.handoff_at
        self._forced: Pipeline | None = wish.pipeline
        if self._forced is None:
            self._forced = "relay" if wish.handoff_at is not None else (None if policy.pipeline == "auto" else policy.pipeline)
        forced_handoff = wish.handoff or (None if policy.handoff == "auto" else policy.handoff)
        self._handoff = HandoffRun(forced_handoff, policy.catch_up_chunk, wish.handoff_at, timeline)
        self._holders = Holders(request)
        self._main: Holder | None = None
        self._relay: Holder | None = None
        self._prefill: PrefillRun | None = None
        self._recomputed_on: frozenset[str] = frozenset()
        self._share = context.prompts.join(request.tenant, request.prompt_ids)
        self._awaits_shared = False  # relays, and main is opened when another request's KV is there

    async def run(self) -> None:
        """Until the request has finished and every holder was told. Raises PddError. Cancelling it lets go of every holder at once."""
        try:
            for holder, event in await self._begin():
                self._on_event(holder, event)
            while self._acceptor.finish_reason is None:
                item = await self._holders.next(self._handoff.seal_deadline)
                if item is None:
                    self._relay_stalled()
                else:
                    self._on_event(*item)
        except BaseException:
            self._share.leave()
            await self._holders.drop_all()
            raise
        self._share.leave()
        await self._holders.release_all()

    # --- before the first token

    async def _begin(self) -> list[tuple[Holder, Event]]:
        """Reserve, choose, start prefill; or go on from what a request with the same prompt brings. Events to be handled next."""
        may_relay = self._forced != "direct" and self._pool.has_role("relay")
        if await self._enter(may_relay) == "relay":
            reserved = await reserve(self._pool, self._holders, True, self._relay_limit, self._share, with_main=False)
            if reserved.relay is not None and reserved.relay.miss_tokens(self._prompt_tokens) == 0:
                self._relay_shared(reserved.relay)
                return reserved.early
            if reserved.relay is not None:
                self._holders.release(reserved.relay)  # its cache has let go of the prompt, or keeps none: bring it anew
            else:
                await self._enter(may_relay=False)
        reserved = await reserve(self._pool, self._holders, may_relay, self._relay_limit, self._share)
        self._choose(reserved)
        self._start_prefill()
        return reserved.early

    async def _enter(self, may_relay: bool) -> Entry:
        if self._prompt_tokens == 1:
            return "alone"  # there is no KV to share
        must_relay = may_relay and self._forced == "relay"
        entry = await self._share.enter(may_relay, must_relay, min(SHARE_WAIT_S, self._holders.remaining_s))
        self._holders.check_deadline()
        if entry == "alone":
            self._count_fallback("shared_late", f"the request with the same prompt had no KV to share after {SHARE_WAIT_S:g} s")
        return entry

    def _relay_shared(self, relay: Holder) -> None:
        """The relay has the prompt from another request, and main will have it."""
        self._relay = relay
        self._timeline.decision = PipelineDecision("relay", "shared", "another request brings main this KV; the relay has it", None)
        self._metrics.pipelines.labels("relay", "shared").inc()
        self._kv_arrived(relay)
        self._awaits_shared = True
        self._share.when_main(lambda: self._holders.tell(relay, SharedAtMain()))

    def _open_main(self) -> None:
        """Main joins a request that a relay has begun."""
        self._awaits_shared = False
        worker = self._pool.route("main", preferred=self._share.main)
        if worker is None:
            self._fail_over("main_lost", "no main worker is ready", main_died=False)
        else:
            self._main = self._holders.open(worker, Attach("main", computes=False, decode=False))

    def _main_looked_up(self, main: Holder) -> None:
        hit = main.reserved.hit_tokens if main.reserved is not None else 0
        self._timeline.main_hit_tokens = hit
        self._metrics.cache_queries.labels("main").inc(self._prompt_tokens - 1)
        self._metrics.cache_hits.labels("main").inc(hit)

    def _choose(self, reserved: Reservation) -> None:
        for part, message in reserved.losses:
            self._count_fallback(f"{part}_lost", message)
        self._main, self._relay = reserved.main, reserved.relay
        if self._main is not None:
            self._main_looked_up(self._main)
        elif self._relay is None:
            cause = "; ".join(message for _, message in reserved.losses)
            self._timeline.decision = PipelineDecision("direct", "main_lost", cause, None)
            self._recompute(behind_relay=False, cause=cause)
            return
        decision = choose_pipeline(
            pipeline_snapshot(reserved, self._prompt_tokens, self._pool, self._links), self._forced, self._config.policy.direct_budget_s
        )
        self._timeline.decision = decision
        self._metrics.pipelines.labels(decision.pipeline, decision.reason).inc()
        if decision.pipeline == "direct":
            assert self._main is not None
            if self._relay is not None:
                self._holders.release(self._relay)
                self._relay = None
            if reserved.main_decodes:
                self._handoff.main_opened_with(())
            else:
                self._handoff.commit_now(self._main, self._acceptor.log.ids)

    def _start_prefill(self) -> None:
        decoders = [h for h in (self._relay, self._main) if h is not None and not h.computes and not h.kv_here]
        targets = [holder for holder in decoders if holder.miss_tokens(self._prompt_tokens) > 0]
        self._share.relay_is_coming(self._relay in targets)
        for holder in decoders:
            if holder not in targets:
                self._kv_arrived(holder)
        if not targets:
            return
        worker = self._pool.route("prefill")
        if worker is None:
            self._fail_over("prefill_lost", "no prefill worker is ready", main_died=False)
            return
        self._prefill = PrefillRun(open_prefill(self._holders, worker, targets), targets, self._config, self._timeline)

    # --- events

    def _on_event(self, holder: Holder, event: Event) -> None:
        """Dispatch one event. ``holder`` may have been let go of while earlier events of the same turn were handled."""
        if holder.released:
            return
        match event:
            case SharedAtMain():
                if self._awaits_shared:
                    self._open_main()
            case Reserved():
                holder.reserved = event
                if holder is self._main and not holder.computes:
                    self._main_looked_up(holder)
                    self._start_prefill()
            case Prefilled() if self._prefill is not None and holder is self._prefill.holder:
                self._prefill.prefilled(event, self._prompt_tokens, self._metrics)
            case Prefilled():
                self._timeline.main_prefill_tokens += event.computed_tokens
                self._kv_arrived(holder)
            case KvComplete():
                self._kv_received(holder, event)
            case Pushed(target):
                if event.tokens:
                    self._metrics.kv_pushes.labels(target, event.codec).inc()
                self._push_ended(target, acknowledged=True)
            case PushFailed(target, message):
                self._push_failed(target, message)
            case Proposed():
                self._proposed(holder, event)
            case Ingested(length):
                if holder is self._main:  # a relay says so too, when it is told to resume
                    self._handoff.ingested(length)
                    self._advance()
            case Sealed(length) if holder is self._relay:
                self._relay_sealed(holder, length)
            case Failed():
                self._lost(holder, event)
            case _:
                self._lost(holder, Failed(Code.INTERNAL, f"{type(event).__name__} was not asked for", died=False))

    def _kv_received(self, holder: Holder, event: KvComplete) -> None:
        if self._prefill is not None and event.received_bytes > 0:
            took_s = self._prefill.received(holder, event, self._links, self._metrics)
            decision = self._timeline.decision
            if holder is self._main and decision is not None and decision.predicted_kv_s is not None:
                self._metrics.prediction_error_s.observe(took_s - decision.predicted_kv_s)
        if holder is self._main:
            self._timeline.wan_kv_bytes += event.received_bytes
            self._timeline.wan_kv_wire_bytes += event.received_wire_bytes
            self._timeline.wan_kv_tokens += event.received_tokens
        self._kv_arrived(holder)

    def _kv_arrived(self, holder: Holder) -> None:
        holder.kv_here = True
        now = self._timeline.now_s()
        if holder is self._relay:
            self._share.kv_at_relay(holder.worker.name)
            if self._timeline.relay_kv_s is None:
                self._timeline.relay_kv_s = now
        if holder is self._main:
            self._share.kv_at_main(holder.worker.name)
            if self._timeline.main_kv_s is None:
                self._timeline.main_kv_s = now
            self._advance()

    def _push_ended(self, target: str, acknowledged: bool) -> None:
        for holder in (self._main, self._relay):
            if acknowledged and holder is not None and holder.worker.name == target:
                holder.acknowledged = True
        if self._prefill is not None:
            self._prefill.target_ended(target, self._holders)

    def _push_failed(self, target: str, message: str) -> None:
        holder = next((h for h in (self._main, self._relay) if h is not None and h.worker.name == target and not h.computes), None)
        self._push_ended(target, acknowledged=False)
        if holder is not None and not holder.kv_here:
            self._lost(holder, Failed(Code.UNAVAILABLE, f"its KV did not arrive: {message}", died=False), "transfer_failed")

    def _proposed(self, holder: Holder, event: Proposed) -> None:
        for index, record in enumerate(event.records):
            try:
                delta = self._acceptor.accept(event.position + index, record, holder.origin)
            except TokenLogError as error:
                self._lost(holder, Failed(Code.INTERNAL, str(error), died=False))
                return
            if delta is None:
                self._metrics.duplicate_tokens.inc()
                continue
            self._metrics.token(delta.origin, self._timeline.token(delta.origin))
            if holder is self._main:
                self._main_took_over()
            self._emit(delta if delta.finish_reason is None else replace(delta, timeline=self._timeline.build()))
            if delta.finish_reason is not None:
                return
        self._advance()

    def _main_took_over(self) -> None:
        """Main's first token is accepted: the handoff is done and the relay, which could have resumed until now, is let go of."""
        if self._timeline.handoff_start_s is not None and self._timeline.handoff_done_s is None:
            self._timeline.handoff_done_s = self._timeline.now_s()
            self._metrics.handoffs.labels(self._timeline.handoff).inc()
            self._metrics.handoff_s.observe(self._timeline.handoff_done_s - self._timeline.handoff_start_s)
        if self._relay is not None:
            self._share.relay_is_coming(False)
            self._holders.release(self._relay)
            self._relay = None

    def _relay_sealed(self, relay: Holder, length: int) -> None:
        if length != len(self._acceptor.log):
            self._lost(relay, Failed(Code.INTERNAL, f"sealed at {length}, the log has {len(self._acceptor.log)} tokens", died=False))
            return
        self._handoff.sealed()
        if self._main is None and not self._awaits_shared:
            self._handoff.resume_relay(relay, self._acceptor.log.ids)
        self._advance()

    def _advance(self) -> None:
        if self._main is not None and self._main.kv_here and self._acceptor.finish_reason is None:
            self._handoff.advance(self._main, self._relay, self._acceptor.log.ids)

    # --- losses

    def _relay_stalled(self) -> None:
        if self._relay is not None:
            self._lost(self._relay, Failed(Code.UNAVAILABLE, "did not seal in time", died=False))

    def _lost(self, holder: Holder, failure: Failed, reason: str | None = None) -> None:
        """``holder`` has no further part in this request."""
        self._holders.drop(holder)
        holder.worker.note_failure(failure)
        message = f"{holder.worker.name}: {failure.message}"
        begun = len(self._acceptor.log) > 0
        refused = failure.code is Code.RESOURCE_EXHAUSTED and holder is not self._relay and not begun
        if failure.code in REQUEST_ERRORS or refused:
            raise PddError(failure.code, message)
        if self._prefill is not None and holder is self._prefill.holder:
            self._prefill.holder = None
            if all(_state(h) != "awaiting" for h in (self._main, self._relay)):
                return  # its work was done
        if holder is self._relay:
            self._relay = None
            self._share.relay_is_coming(False)
            self._handoff.relay_gone()
            if self._handoff.committed:
                return  # main was on its way to take over
        if holder is self._main:
            self._main = None
            self._handoff.main_reset()
        self._fail_over(reason or f"{holder.part}_lost", message, main_died=holder.part == "main" and failure.died)

    def _fail_over(self, reason: str, cause: str, main_died: bool) -> None:
        self._count_fallback(reason, cause)
        if self._awaits_shared:
            self._open_main()
            return
        log_ids = self._acceptor.log.ids
        sends = self._prefill is not None and self._prefill.sends
        snapshot = FailoverSnapshot(_state(self._main), _state(self._relay), sends)
        plan = plan_failover(snapshot, main_died)
        if plan.source == "relay":
            if self._handoff.relay_sealed and self._relay is not None:
                self._handoff.resume_relay(self._relay, log_ids)
            if plan.recompute:
                self._recompute(behind_relay=True, cause=cause)
        elif plan.source == "main" and self._main is not None:
            self._handoff.commit_now(self._main, log_ids)
        else:
            self._recompute(behind_relay=False, cause=cause)

    def _recompute(self, behind_relay: bool, cause: str) -> None:
        """Attach a worker anew in main's part; it computes the prompt's KV itself. ``behind_relay``: the relay goes on and hands over
        later, or goes on to the end if nobody can recompute. Raises PddError UNAVAILABLE when nobody is left. Each worker is tried once.
        """
        excluded = self._recomputed_on
        worker = self._pool.route("main", excluded)
        if worker is None and not behind_relay:
            worker = self._pool.route("relay", excluded)
        if worker is None or not self._config.policy.fallback_recompute:
            if behind_relay:
                return
            raise PddError(Code.UNAVAILABLE, f"cannot go on after {len(self._acceptor.log)} tokens: {cause}")
        self._recomputed_on = excluded | {worker.name}
        useless = [self._main] if behind_relay else [self._main, self._relay, None if self._prefill is None else self._prefill.holder]
        for holder in useless:
            if holder is not None:
                self._holders.drop(holder)
        log_ids: tuple[int, ...] = ()
        self._handoff.main_reset()
        if not behind_relay:
            self._relay = self._prefill = None
            log_ids = tuple(self._acceptor.log.ids)
            self._handoff.relay_gone()
            self._handoff.main_opened_with(log_ids)
        self._main = self._holders.open(worker, Attach("main", computes=True, decode=not behind_relay, log_ids=log_ids))

    def _count_fallback(self, reason: str, cause: str) -> None:
        self._timeline.fallbacks += 1
        self._metrics.fallbacks.labels(reason).inc()
        _log.warning("request %s: fallback %s after %d tokens: %s", self._request.request_id, reason, len(self._acceptor.log), cause)

    @property
    def _prompt_tokens(self) -> int:
        return len(self._request.prompt_ids)


def _state(holder: Holder | None) -> HolderState:
    return "none" if holder is None else holder.state
