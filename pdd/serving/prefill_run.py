"""Prefill's part in one request: opened with the targets that lack KV, watched until each target has everything, measured for the link."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pdd.policy.pipeline import PipelineDecision
from pdd.serving.holders import Attach, Holder, Holders
from pdd.serving.learned import Learned
from pdd.serving.link_estimate import Link, LinkEstimate, TransferSample
from pdd.serving.link_traffic import LinkTraffic
from pdd.serving.metrics import Metrics
from pdd.serving.timeline import TimelineRecorder
from pdd.serving.worker_events import KvComplete, Prefilled
from pdd.serving.worker_pool import PooledWorker
from pddbridge.link_schedule import Priority
from pddbridge.rpc.convert import priority_to_proto
from pddbridge.rpc.gen import worker_pb2

# A push that nobody needs by any time has this one, rather than none: those without a deadline go last.
_LATEST_S = 3600.0


@dataclass(frozen=True)
class PushClass:
    """How a push goes on a link that others use, too. ``deadline_s``: from now, until when its KV is wanted; None: nobody can say."""

    priority: Priority
    deadline_s: float | None = None


def push_class(holder: Holder, decision: PipelineDecision | None) -> PushClass:
    """Of the push to ``holder``: for a relay a request waits."""
    if holder.part == "relay" or decision is None:
        return PushClass(Priority.URGENT)
    if decision.pipeline == "direct":
        computed_s = (decision.predicted_kv_s or 0.0) - (decision.predicted_wait_s or 0.0)
        deadline_s = None if decision.budget_s is None else min(_LATEST_S, computed_s + decision.budget_s)
    else:
        deadline_s = None if decision.ends_on_relay else decision.predicted_relay_end_s
    return PushClass(decision.push_priority, deadline_s)


def open_prefill(holders: Holders, worker: PooledWorker, targets: Mapping[Holder, PushClass], traffic: LinkTraffic) -> Holder:
    """``worker`` computes the prompt's KV and pushes to each target what that target lacks."""
    prompt_tokens = len(holders.request.prompt_ids)
    push_to = tuple(_push_target(target, wanted, worker, prompt_tokens, traffic) for target, wanted in targets.items())
    return holders.open(worker, Attach("prefill", computes=True, decode=False, push_to=push_to))


def _push_target(
    target: Holder, wanted: PushClass, worker: PooledWorker, prompt_tokens: int, traffic: LinkTraffic
) -> worker_pb2.PushTarget:
    """Counted as ordered from now on."""
    assert target.reserved is not None
    route = target.worker.place.route(worker.place.site)
    num_bytes = target.miss_tokens(prompt_tokens) * target.worker.info.kv_bytes_per_token
    traffic.ordered((worker.place.site, target.worker.place.site), worker.name, target, num_bytes, wanted.priority)
    return worker_pb2.PushTarget(
        target=target.worker.name,
        host=route.kv.host,
        port=route.kv.port,
        link=route.kv_link,
        nixl_port=target.worker.info.nixl_port,
        epoch=target.reserved.epoch,
        transfer_id=target.reserved.transfer_id,
        first_token=target.reserved.hit_tokens,
        priority=priority_to_proto(wanted.priority),
        deadline_s=wanted.deadline_s,
    )


class PrefillRun:
    """``holder`` is None once prefill has nothing left to do or was lost. ``is_early``: begun before it is known who gets its KV, so that
    it is not let go of before :meth:`settle`.
    """

    def __init__(
        self, holder: Holder, targets: Collection[Holder], timeline: TimelineRecorder, learned: Learned, is_early: bool = False
    ) -> None:
        self.holder: Holder | None = holder
        self.is_early = is_early
        self.worker = holder.worker
        self._targets = {target.worker.name for target in targets}
        self._ended: set[str] = set()
        self._max_step_tokens = max(1, holder.worker.info.max_step_tokens)
        self._timeline = timeline
        self._learned = learned
        self._started_s = timeline.now_s()
        self._ordered_s = dict.fromkeys(self._targets, self._started_s)
        self._computed_tokens = 0

    def route(self, target: Holder) -> Link:
        return self.worker.place.site, target.worker.place.site

    def settle(self, targets: Mapping[Holder, PushClass], holders: Holders, traffic: LinkTraffic) -> None:
        """One that was begun early gets to know all of its receivers; what it had pushed to another is of no use."""
        assert self.is_early, "settled once"
        assert self.holder is not None, "nobody settles a prefill that was lost"
        self.is_early = False
        for target, wanted in targets.items():
            if target.worker.name not in self._targets:
                self._ordered_s[target.worker.name] = self._timeline.now_s()
                prompt_tokens = len(holders.request.prompt_ids)
                self.holder.stream.add_target(_push_target(target, wanted, self.worker, prompt_tokens, traffic))
        self._targets = {target.worker.name for target in targets}
        self._release_if_done(holders)

    @property
    def age_s(self) -> float:
        """Since prefill was opened."""
        return self._timeline.now_s() - self._started_s

    @property
    def sends(self) -> bool:
        return self.holder is not None

    def prefilled(self, event: Prefilled, prompt_tokens: int, metrics: Metrics) -> None:
        self._computed_tokens = event.computed_tokens
        self._timeline.prefill_done_s = self._timeline.now_s()
        self._learned.prefilled(self.worker.name, event.computed_tokens, self._timeline.prefill_done_s - self._started_s)
        metrics.cache_queries.labels("prefill").inc(prompt_tokens - 1)
        metrics.cache_hits.labels("prefill").inc(max(0, prompt_tokens - 1 - event.computed_tokens))

    def target_ended(self, name: str, holders: Holders) -> None:
        """``name`` has everything, or its push failed. Prefill is let go of when no target is left."""
        self._ended.add(name)
        self._release_if_done(holders)

    def received(self, target: Holder, event: KvComplete, links: LinkEstimate, metrics: Metrics) -> float:
        """``target`` has its KV. Returns the seconds since prefill was opened, or was told of ``target`` where that was later."""
        route = self.route(target)
        bytes_per_token = target.worker.info.kv_bytes_per_token
        last_chunk_tokens = (self._computed_tokens - 1) % self._max_step_tokens + 1 if self._computed_tokens else event.received_tokens
        sample = TransferSample(
            num_bytes=event.received_bytes,
            started_s=self._ordered_s.get(target.worker.name, self._started_s),
            prefilled_s=self._timeline.prefill_done_s,
            completed_s=self._timeline.now_s(),
            last_chunk_bytes=last_chunk_tokens * bytes_per_token,
            rtt_s=target.worker.rtt_s,
        )
        links.observe(route, sample)
        link = "-".join(route)
        metrics.kv_bytes.labels(link).inc(event.received_bytes)
        metrics.kv_wire_bytes.labels(link).inc(event.received_wire_bytes)
        goodput = links.goodput_bytes_s(route)
        if goodput is not None:
            metrics.kv_goodput.labels(link).set(goodput)
        return sample.completed_s - sample.started_s

    def _release_if_done(self, holders: Holders) -> None:
        if self.holder is not None and not self.is_early and self._targets <= self._ended:
            holders.release(self.holder)
            self.holder = None
