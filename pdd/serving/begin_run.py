"""The beginning of one request, until its first token: reserve at main and relay, choose the pipeline, start prefill."""

from __future__ import annotations

from collections.abc import Callable

from pdd.policy.pipeline import RELAY_FIRST, Pipeline, PipelineDecision, choose_pipeline
from pdd.serving.failover_run import FailoverRun
from pdd.serving.holders import Holder
from pdd.serving.local_run import begin_local
from pdd.serving.pipeline_snapshot import pipeline_snapshot
from pdd.serving.prefill_run import PrefillRun, PushClass, open_prefill, push_class
from pdd.serving.request_parts import RequestParts
from pdd.serving.reservation import Reservation, reserve
from pdd.serving.shared_prompts import SHARE_WAIT_S, Entry
from pdd.serving.worker_events import Event, KvComplete, Prefilled, Proposed, SharedAtMain
from pddbridge.link_schedule import Priority


class BeginRun:
    """``run`` once; ``start_prefill`` again when main joins later."""

    def __init__(self, parts: RequestParts, failover: FailoverRun) -> None:
        self._parts = parts
        self._failover = failover
        wish = parts.request.override
        policy = parts.context.config.policy
        self._relay_limit = parts.handoff.relay_limit
        self._forced: Pipeline | None = wish.pipeline
        if self._forced is None:
            self._forced = "relay" if wish.handoff_at is not None else (None if policy.pipeline == "auto" else policy.pipeline)

    async def run(self, on_event: Callable[[Holder, Event], None]) -> list[tuple[Holder, Event]]:
        """Reserve, choose, start prefill; or go on from what a request with the same prompt brings. Events to be handled next; ``on_event``
        for those that need not wait for main's answer.
        """
        parts = self._parts
        may_relay = self._forced != "direct" and parts.context.pool.has_role("relay")
        if await self._enter(may_relay) == "relay":
            reserved = await reserve(parts.context.pool, parts.holders, True, self._relay_limit, parts.share, with_main=False)
            if reserved.relay is not None and reserved.relay.miss_tokens(parts.prompt_tokens) == 0:
                parts.context.granted(parts.request.request_id)
                self._relay_shared(reserved.relay)
                return reserved.early
            if reserved.relay is not None:
                parts.holders.release(reserved.relay)  # its cache has let go of the prompt, or keeps none: bring it anew
            else:
                await self._enter(may_relay=False)
        early = _EarlyRelay(parts, on_event)
        reserved = await reserve(parts.context.pool, parts.holders, may_relay, self._relay_limit, parts.share, early=early)
        parts.context.granted(parts.request.request_id)
        if early.is_over:
            parts.context.metrics.pipelines.labels("relay", "relay_first").inc()
            return []
        self._choose(reserved)
        self.start_prefill()
        return reserved.early

    async def _enter(self, may_relay: bool) -> Entry:
        parts = self._parts
        if parts.prompt_tokens == 1:
            return "alone"  # there is no KV to share
        must_relay = may_relay and self._forced in ("relay", "local")
        entry = await parts.share.enter(may_relay, must_relay, min(SHARE_WAIT_S, parts.holders.remaining_s))
        parts.holders.check_deadline()
        if entry == "alone":
            parts.count_fallback("shared_late", f"the request with the same prompt had no KV to share after {SHARE_WAIT_S:g} s")
        return entry

    def _relay_shared(self, relay: Holder) -> None:
        """The relay has the prompt from another request, and main will have it."""
        parts = self._parts
        parts.relay = relay
        parts.timeline.decision = PipelineDecision("relay", "shared", "another request brings main this KV; the relay has it", None)
        parts.context.metrics.pipelines.labels("relay", "shared").inc()
        parts.kv_arrived(relay)
        parts.awaits_shared = True
        parts.share.when_main(lambda: parts.holders.tell(relay, SharedAtMain()))

    def main_looked_up(self, main: Holder) -> None:
        """Main has said what it holds of the prompt."""
        parts = self._parts
        if parts.timeline.redecision:
            return  # it was asked before
        hit = main.reserved.hit_tokens if main.reserved is not None else 0
        parts.timeline.main_hit_tokens = hit
        parts.main_asked = True
        if main.miss_tokens(parts.prompt_tokens) == 0:
            parts.count_look_up(None)
        elif parts.prefilled_tokens is not None:
            parts.count_look_up(parts.prefilled_tokens)
        parts.context.metrics.cache_queries.labels("main").inc(parts.prompt_tokens - 1)
        parts.context.metrics.cache_hits.labels("main").inc(hit)

    def _choose(self, reserved: Reservation) -> None:
        parts = self._parts
        for part, message in reserved.losses:
            parts.count_fallback(f"{part}_lost", message)
        parts.main, parts.relay = reserved.main, reserved.relay
        if parts.main is not None:
            self.main_looked_up(parts.main)
        elif parts.relay is None:
            cause = "; ".join(message for _, message in reserved.losses)
            parts.timeline.decision = PipelineDecision("direct", "main_lost", cause, None)
            self._failover.recompute(behind_relay=False, cause=cause)
            return
        decision = choose_pipeline(pipeline_snapshot(reserved, parts), self._forced, parts.context.config.policy)
        parts.timeline.decision = decision
        parts.context.metrics.pipelines.labels(decision.pipeline, decision.reason).inc()
        parts.context.learned.quota.record(decision.pipeline == "local")
        if decision.pipeline == "local":
            begin_local(parts, decision)
        if decision.pipeline == "direct":
            assert parts.main is not None
            if parts.relay is not None:
                parts.holders.release(parts.relay)
                parts.relay = None
            if reserved.main_decodes:
                parts.handoff.main_opened_with(())
            else:
                parts.handoff.commit_now(parts.main, parts.acceptor.log.ids)

    def start_prefill(self) -> None:
        """For whoever lacks KV of the prompt and does not compute it; the others have it now."""
        parts = self._parts
        decoders = [h for h in (parts.relay, parts.main) if h is not None and not h.computes and not h.kv_here]
        targets = [holder for holder in decoders if holder.miss_tokens(parts.prompt_tokens) > 0]
        parts.share.relay_is_coming(parts.relay in targets)
        for holder in decoders:
            if holder not in targets:
                parts.kv_arrived(holder)
        early = parts.prefill if parts.prefill is not None and parts.prefill.is_early and parts.prefill.sends else None
        if not targets:
            if early is not None:
                early.settle({}, parts.holders, parts.context.traffic)
            return
        worker = early.worker if early is not None else parts.context.pool.route("prefill", request=parts.request)
        if worker is None:
            self._failover.fail_over("prefill_lost", "no prefill worker is ready", main_died=False)
            return
        # One that was brought in after all is waited for.
        decision = None if parts.timeline.redecision else parts.timeline.decision
        classes = {target: push_class(target, decision) for target in targets}
        parts.deferred = any(wanted.priority is Priority.BACKGROUND for wanted in classes.values())
        if early is not None:
            early.settle(classes, parts.holders, parts.context.traffic)
            return
        holder = open_prefill(parts.holders, worker, classes, parts.context.traffic)
        parts.prefill = PrefillRun(holder, targets, parts.timeline, parts.context.learned)


class _EarlyRelay:
    """A relay that begins while main's answer crosses the link. Not kept: with ``on_event`` it refers to the whole request."""

    def __init__(self, parts: RequestParts, on_event: Callable[[Holder, Event], None]) -> None:
        self._parts = parts
        self._on_event = on_event

    def begin(self, relay: Holder) -> None:
        """The relay has reserved: prefill starts, for the relay alone as yet, while main's answer crosses the link."""
        parts = self._parts
        parts.relay = relay
        worker = parts.context.pool.route("prefill", request=parts.request)
        if worker is None or relay.miss_tokens(parts.prompt_tokens) == 0:
            return
        holder = open_prefill(parts.holders, worker, {relay: PushClass(Priority.URGENT)}, parts.context.traffic)
        parts.prefill = PrefillRun(holder, [relay], parts.timeline, parts.context.learned, is_early=True)

    def take(self, holder: Holder, event: Event) -> bool:
        """The relay's tokens are the reader's as they come, and so is what leads to them. The one that reaches the length limit waits:
        whether main's transfer is to go on after the end is asked when there is one.
        """
        parts = self._parts
        match event:
            case Prefilled():
                takes = parts.prefill is not None and holder is parts.prefill.holder
            case KvComplete():
                takes = holder is parts.relay
            case Proposed(position, records):
                takes = holder is parts.relay and position + len(records) < parts.request.sampling.max_tokens
                if takes and parts.timeline.decision is None:
                    parts.timeline.decision = RELAY_FIRST
            case _:
                takes = False
        if takes:
            self._on_event(holder, event)
        return takes

    @property
    def is_over(self) -> bool:
        return self._parts.acceptor.finish_reason is not None

    def withdraw(self) -> None:
        parts = self._parts
        if parts.prefill is not None and parts.prefill.holder is not None:
            parts.holders.release(parts.prefill.holder)
            parts.prefill = None
