"""The life of one request: reserve, choose the pipeline, prefill, relay, hand off, main, end. One task, one inbox, events in order.

Every token goes through the acceptor. Whoever is lost, the request goes on from its log or ends with a PddError, never silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pdd.errors import Code
from pdd.serving.acceptor import Acceptor
from pdd.serving.begin_run import BeginRun
from pdd.serving.failover_run import FailoverRun
from pdd.serving.handoff_run import HandoffRun
from pdd.serving.holders import Holder, Holders
from pdd.serving.local_run import OVERRUN
from pdd.serving.main_transfer import hurry_if_late, request_ended, see_through
from pdd.serving.metrics import Metrics
from pdd.serving.paced_delivery import PacedDelivery
from pdd.serving.request import Delta, GenerationRequest
from pdd.serving.request_parts import RequestParts, RunContext
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


class RequestRun:
    """``run`` once. Deltas go to ``emit`` as they are accepted; the last one carries the finish reason and the timeline."""

    def __init__(
        self, request: GenerationRequest, context: RunContext, acceptor: Acceptor, timeline: TimelineRecorder, emit: Callable[[Delta], None]
    ) -> None:
        # Nothing that its parts keep refers to the whole: a request is freed when it ends, not when garbage is collected.
        self._delivery = PacedDelivery(partial(_release, timeline, context.metrics, emit))
        self._parts = RequestParts(
            request,
            context,
            acceptor,
            timeline,
            Holders(request, context.config.survival.max_attempts),
            HandoffRun(request.override, context.config.policy, context.figures, context.metrics, timeline, self._delivery),
            context.prompts.join(request.tenant, request.prompt_ids),
        )
        self._failover = FailoverRun(self._parts)
        self._begin = BeginRun(self._parts, self._failover)

    async def run(self) -> None:
        """Until the request has finished and every holder was told. Raises PddError. Cancelling it lets go of every holder at once."""
        parts = self._parts
        try:
            for holder, event in await self._begin.run(self._on_event):
                self._on_event(holder, event)
            while parts.acceptor.finish_reason is None:
                if self._failover.stranded:
                    await self._failover.outlast()
                item = await parts.holders.next(parts.handoff.seal_deadline)
                if item is None:
                    self._failover.relay_stalled()
                else:
                    self._on_event(*item)
        except BaseException:
            self._delivery.close()
            parts.share.leave()
            await parts.holders.drop_all()
            raise
        if parts.goes_on:
            see_through(parts)
            return
        parts.share.leave()
        await parts.holders.release_all()

    # --- events

    def _on_event(self, holder: Holder, event: Event) -> None:
        """Dispatch one event. ``holder`` may have been let go of while earlier events of the same turn were handled."""
        parts = self._parts
        if holder.released:
            return
        match event:
            case SharedAtMain():
                if parts.awaits_shared:
                    self._failover.open_main()
            case Reserved():
                holder.reserved = event
                if holder is parts.main and not holder.computes:
                    self._begin.main_looked_up(holder)
                    self._begin.start_prefill()
            case Prefilled() if parts.prefill is not None and holder is parts.prefill.holder:
                parts.prefill.prefilled(event, parts.prompt_tokens, parts.context.metrics)
                parts.prefilled_tokens = event.computed_tokens
                parts.count_look_up(event.computed_tokens)
            case Prefilled() if holder.part == "prefill":
                pass  # of a prefill that another has taken the place of, for a target that joined later
            case Prefilled():
                parts.timeline.main_prefill_tokens += event.computed_tokens
                parts.kv_arrived(holder)
            case KvComplete():
                self._kv_received(holder, event)
            case Pushed(target):
                if event.tokens:
                    parts.context.metrics.kv_pushes.labels(target, event.codec).inc()
                self._push_ended(target, acknowledged=True)
            case PushFailed(target, message):
                self._push_failed(target, message)
            case Proposed():
                self._proposed(holder, event)
            case Ingested(length):
                if holder is parts.main:  # a relay says so too, when it is told to resume
                    parts.handoff.ingested(holder, length)
                    parts.advance()
            case Sealed(length) if holder is parts.relay:
                self._relay_sealed(holder, length)
            case Failed():
                self._failover.lost(holder, event)
            case _:
                self._failover.lost(holder, Failed(Code.INTERNAL, f"{type(event).__name__} was not asked for", died=False))

    def _kv_received(self, holder: Holder, event: KvComplete) -> None:
        parts = self._parts
        if parts.prefill is not None and event.received_bytes > 0:
            took_s = parts.prefill.received(holder, event, parts.context.links, parts.context.metrics)
            decision = parts.timeline.decision
            if holder is parts.main:
                parts.timeline.kv_s = took_s
                if decision is not None and decision.predicted_kv_s is not None and not parts.timeline.redecision:
                    parts.context.metrics.prediction_error_s.observe(took_s - decision.predicted_kv_s)
                    if decision.pipeline == "direct":  # urgent, as predicted for; behind a relay it may take its time
                        parts.context.learned.arrived(parts.prefill.route(holder), took_s - decision.predicted_kv_s + decision.late_s)
        if holder is parts.main:
            parts.timeline.wan_kv_bytes += event.received_bytes
            parts.timeline.wan_kv_wire_bytes += event.received_wire_bytes
            parts.timeline.wan_kv_tokens += event.received_tokens
        parts.kv_arrived(holder)

    def _push_ended(self, target: str, acknowledged: bool) -> None:
        parts = self._parts
        for holder in (parts.main, parts.relay):
            if acknowledged and holder is not None and holder.worker.name == target:
                holder.acknowledged = True
        if parts.prefill is not None:
            parts.prefill.target_ended(target, parts.holders)

    def _push_failed(self, target: str, message: str) -> None:
        parts = self._parts
        holder = next((h for h in (parts.main, parts.relay) if h is not None and h.worker.name == target and not h.computes), None)
        self._push_ended(target, acknowledged=False)
        if holder is not None and not holder.kv_here:
            self._failover.lost(holder, Failed(Code.UNAVAILABLE, f"its KV did not arrive: {message}", died=False), "transfer_failed")

    def _proposed(self, holder: Holder, event: Proposed) -> None:
        parts = self._parts
        for position, record in enumerate(event.records, event.position):
            if not parts.handoff.counts(holder, position, record.token_id, parts.acceptor.log.ids):
                continue
            try:
                delta = parts.acceptor.accept(position, record, holder.origin)
            except TokenLogError as error:
                self._failover.lost(holder, Failed(Code.INTERNAL, str(error), died=False))
                return
            if delta is None:
                parts.context.metrics.duplicate_tokens.inc()
                continue
            parts.timeline.accepted(delta.origin)
            parts.context.metrics.generation_tokens.labels(delta.origin).inc()
            gap_s = parts.handoff.accepted(holder, None if parts.deferred else parts.main)
            if gap_s is not None and delta.origin == "relay":
                parts.context.learned.relay_s.observe(gap_s, 1)
            if holder is parts.main and parts.relay is not None:
                parts.share.relay_is_coming(False)  # until now it could have resumed
                parts.holders.release(parts.relay)
                parts.relay = None
            if delta.finish_reason is not None:
                request_ended(parts)
            self._delivery.push(delta)
            if delta.finish_reason is not None:
                return
        if parts.local_limit is not None and len(parts.acceptor.log) > parts.local_limit:
            self._failover.leave_local(OVERRUN)
        if parts.deferred:
            hurry_if_late(parts)
        parts.advance()

    def _relay_sealed(self, relay: Holder, length: int) -> None:
        parts = self._parts
        if length != len(parts.acceptor.log):
            self._failover.lost(
                relay, Failed(Code.INTERNAL, f"sealed at {length}, the log has {len(parts.acceptor.log)} tokens", died=False)
            )
            return
        main_is_coming = parts.main is not None or parts.awaits_shared
        parts.handoff.sealed(relay, main_is_coming, parts.acceptor.log.ids)
        parts.advance()


def _release(timeline: TimelineRecorder, metrics: Metrics, emit: Callable[[Delta], None], delta: Delta) -> None:
    """``delta`` is the reader's now."""
    gap_s = timeline.delivered(delta.origin)
    if gap_s is not None:
        metrics.itl_s.observe(gap_s)
    emit(delta if delta.finish_reason is None else replace(delta, timeline=timeline.build()))
