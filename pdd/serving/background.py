"""Transfers to main that nobody waits for: of requests that ended on the relay, so that main's cache does not fall behind prefill's.

Two kinds. One that runs when its request ends goes on, in the lowest class. One that was cut from the start is remembered, and made when
the link is idle. All end: complete, at their deadline, when the link or main is needed by others, or with the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, replace

from pdd.errors import PddError
from pdd.policy.completion import POLL_S, CompletionDecision, CompletionSnapshot, choose_completion, pressing
from pdd.policy.link import LinkSnapshot
from pdd.policy_config import BackgroundConfig
from pdd.serving.holders import Attach, Holder, Holders
from pdd.serving.learned import Learned
from pdd.serving.link_estimate import Link
from pdd.serving.link_traffic import LinkTraffic
from pdd.serving.metrics import Metrics
from pdd.serving.policy_metrics import PolicyMetrics
from pdd.serving.prefill_run import PushClass, open_prefill
from pdd.serving.request import GenerationRequest
from pdd.serving.shared_prompts import PromptShare, SharedPrompts
from pdd.serving.worker_events import Failed, KvComplete, PushFailed, Reserved
from pdd.serving.worker_pool import PooledWorker, WorkerPool
from pddbridge.link_schedule import Priority

# How long closing waits for their streams to end.
CLOSE_TIMEOUT_S = 3.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Transfer:
    """One that runs. ``wanted``: another request waits for the same prompt, so nothing stops it any more."""

    holders: Holders
    main: Holder
    prefill: Holder
    share: PromptShare
    miss_tokens: int
    num_bytes: int
    deadline_s: float
    wanted: bool = False

    @property
    def route(self) -> Link:
        return self.prefill.worker.place.site, self.main.worker.place.site


@dataclass(frozen=True)
class _Candidate:
    """One that was cut, at ``at_s``."""

    request: GenerationRequest
    at_s: float
    miss_tokens: int
    num_bytes: int


class Background:
    """One per coordinator. ``close`` before the pool is."""

    def __init__(
        self,
        config: BackgroundConfig,
        pool: WorkerPool,
        traffic: LinkTraffic,
        prompts: SharedPrompts,
        learned: Learned,
        metrics: Metrics,
        policy_metrics: PolicyMetrics,
    ) -> None:
        self._config = config
        self._pool = pool
        self._traffic = traffic
        self._prompts = prompts
        self._learned = learned
        self._metrics = metrics
        self._policy_metrics = policy_metrics
        self._running: set[_Transfer] = set()
        self._candidates: deque[_Candidate] = deque(maxlen=config.max_candidates)
        self._tasks: set[asyncio.Task[None]] = set()
        self._making: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_candidates(self) -> int:
        return len(self._candidates)

    def decide(self, prefill: Holder, main: Holder, prompt_tokens: int) -> CompletionDecision:
        """What becomes of a transfer to ``main`` that runs, now that its request has ended."""
        snapshot = self._snapshot(prefill.worker, main.worker, *_missing(main, prompt_tokens), receiver=main)
        return choose_completion(snapshot, self._config)

    def take_over(self, holders: Holders, prefill: Holder, main: Holder, share: PromptShare, prompt_tokens: int) -> None:
        """See the transfer of a request that has ended through: what it holds is held until then."""
        deadline_s = time.monotonic() + min(self._config.deadline_s, holders.remaining_s)
        transfer = _Transfer(holders, main, prefill, share, *_missing(main, prompt_tokens), deadline_s)
        self._set_priority(transfer, Priority.BACKGROUND)
        self._start(transfer)

    def remember(self, request: GenerationRequest, miss_tokens: int, num_bytes: int) -> None:
        """The transfer was cut: it is made when the link is idle, if it is worth that."""
        if self._config.max_transfers == 0 or miss_tokens < self._config.min_tokens:
            return
        self._candidates.append(_Candidate(request, time.monotonic(), miss_tokens, num_bytes))
        if self._candidates and self._making is None:
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._made)

    async def close(self) -> None:
        """Stop all of them and wait, bounded, until every worker was told."""
        self._candidates.clear()
        tasks = {*self._tasks, *([self._making] if self._making is not None else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    # --- one transfer

    def _start(self, transfer: _Transfer) -> asyncio.Task[None]:
        self._running.add(transfer)
        self._policy_metrics.background_running.set(len(self._running))
        transfer.share.when_joined(lambda: self._joined(transfer))
        task = asyncio.create_task(self._run(transfer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _joined(self, transfer: _Transfer) -> None:
        """Another request with the same prompt has begun."""
        transfer.wanted = True
        self._set_priority(transfer, Priority.NORMAL)

    def _set_priority(self, transfer: _Transfer, priority: Priority) -> None:
        transfer.prefill.stream.set_priority(transfer.main.worker.name, priority)
        self._traffic.set_priority(transfer.route, transfer.main, priority)

    async def _run(self, transfer: _Transfer) -> None:
        outcome = "cancelled"
        try:
            outcome = await self._wait(transfer)
        except PddError:
            outcome = "deadline"
        finally:
            if outcome == "complete":
                transfer.share.kv_at_main(transfer.main.worker.name)
            transfer.share.leave()
            try:
                await (transfer.holders.release_all() if outcome == "complete" else transfer.holders.drop_all())
            finally:
                self._running.discard(transfer)
                self._policy_metrics.background_running.set(len(self._running))
                self._policy_metrics.background.labels(outcome).inc()
                _log.info("background transfer of %d tokens to %s: %s", transfer.miss_tokens, transfer.main.worker.name, outcome)

    async def _wait(self, transfer: _Transfer) -> str:
        """Returns how it ended: "complete", "failed", "deadline" or what speaks against it. Raises PddError at the request's deadline."""
        while True:
            item = await transfer.holders.next(min(transfer.deadline_s, time.monotonic() + POLL_S))
            if item is not None:
                holder, event = item
                if isinstance(event, KvComplete) and holder is transfer.main:
                    self._received(transfer, event)
                    return "complete"
                if isinstance(event, Failed) or (isinstance(event, PushFailed) and event.target == transfer.main.worker.name):
                    return "failed"
            if time.monotonic() >= transfer.deadline_s:
                return "deadline"
            workers = transfer.prefill.worker, transfer.main.worker
            snapshot = self._snapshot(*workers, transfer.miss_tokens, transfer.num_bytes, receiver=transfer.main)
            pressed = pressing(snapshot, self._config)
            if pressed is not None and not transfer.wanted:
                return pressed

    def _received(self, transfer: _Transfer, event: KvComplete) -> None:
        link = "-".join(transfer.route)
        self._metrics.kv_bytes.labels(link).inc(event.received_bytes)
        self._metrics.kv_wire_bytes.labels(link).inc(event.received_wire_bytes)
        self._policy_metrics.background_bytes.inc(event.received_bytes)

    # --- those that were cut

    def _made(self, task: asyncio.Task[None]) -> None:
        self._making = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background transfers of cut requests met a fault of ours: %r", error)

    async def _make(self) -> None:
        """Bring what was cut to main, latest first, while the link is idle; ends when none is left."""
        while self._candidates:
            await asyncio.sleep(POLL_S)
            while self._candidates and time.monotonic() - self._candidates[0].at_s > self._config.candidate_s:
                self._candidates.popleft()
                self._policy_metrics.background.labels("forgotten").inc()
            main, prefill = self._pool.route("main"), self._pool.route("prefill")
            if not self._candidates or main is None or prefill is None:
                continue
            candidate = self._candidates[-1]
            snapshot = self._snapshot(prefill, main, candidate.miss_tokens, candidate.num_bytes)
            if choose_completion(snapshot, self._config).complete:
                self._candidates.pop()
                await self._bring(candidate, main, prefill)

    async def _bring(self, candidate: _Candidate, main_worker: PooledWorker, prefill_worker: PooledWorker) -> None:
        request = replace(candidate.request, request_id=f"{candidate.request.request_id}.background", timeout_s=self._config.deadline_s)
        share = self._prompts.join(request.tenant, request.prompt_ids)
        holders = Holders(request)
        outcome = "shared"
        started = False
        try:
            if not share.is_shared:
                await share.enter(may_relay=False, must_relay=False, timeout_s=self._config.deadline_s)
                main = holders.open(main_worker, Attach("main", computes=False, decode=False))
                outcome = await self._reserve(holders, main)
                if outcome == "reserved":
                    prefill = open_prefill(holders, prefill_worker, {main: PushClass(Priority.BACKGROUND)}, self._traffic)
                    deadline_s = time.monotonic() + holders.remaining_s
                    transfer = _Transfer(holders, main, prefill, share, candidate.miss_tokens, candidate.num_bytes, deadline_s)
                    self._start(transfer)
                    started = True
        except PddError:
            outcome = "failed"
        finally:
            if not started:
                self._policy_metrics.background.labels(outcome).inc()
                share.leave()
                await holders.drop_all()

    async def _reserve(self, holders: Holders, main: Holder) -> str:
        while (item := await holders.next()) is not None:
            holder, event = item
            if isinstance(event, Failed):
                return "failed"
            if isinstance(event, Reserved):
                holder.reserved = event
                return "reserved" if event.transfer_id else "there_already"
        return "failed"

    # --- what is known

    def _snapshot(
        self, prefill: PooledWorker, main: PooledWorker, miss_tokens: int, num_bytes: int, receiver: Holder | None = None
    ) -> CompletionSnapshot:
        """``receiver``: of the transfer, if it runs."""
        others = [transfer for transfer in self._running if transfer.main is not receiver]
        running_bytes = sum(transfer.num_bytes for transfer in others)
        route = (prefill.place.site, main.place.site)
        # The policy takes what is in the background off what is queued.
        queued_bytes = self._traffic.urgent_bytes(route, besides=receiver) + running_bytes + num_bytes
        return CompletionSnapshot(
            miss_tokens=miss_tokens,
            num_bytes=num_bytes,
            gap=self._learned.hits.rates(time.monotonic()).gap,
            num_running=len(others),
            running_bytes=running_bytes,
            link=LinkSnapshot(
                goodput_bytes_s=self._traffic.goodput_bytes_s(route),
                queued_bytes=round(queued_bytes),
                num_transfers=self._traffic.num_transfers(route),
            ),
            main_running=main.num_held - (receiver is not None),
            main_capacity=main.info.max_rows,
            begun=receiver is not None,
        )


def _missing(main: Holder, prompt_tokens: int) -> tuple[int, int]:
    """Prompt tokens that main lacks, and their bytes of KV."""
    miss_tokens = main.miss_tokens(prompt_tokens)
    return miss_tokens, miss_tokens * main.worker.info.kv_bytes_per_token
