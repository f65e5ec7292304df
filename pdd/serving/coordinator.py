"""The coordinator: checks and admits requests, runs each in a task of its own, and hands its tokens out in order, exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from pdd.config import LaunchConfig
from pdd.errors import Code, PddError
from pdd.policy.outcomes import DecisionRecord
from pdd.serving.acceptor import Acceptor
from pdd.serving.admission_queue import AdmissionQueue, main_room
from pdd.serving.background import Background
from pdd.serving.decisions import DecisionLog
from pdd.serving.learned import Learned
from pdd.serving.link_estimate import LinkEstimate
from pdd.serving.link_metrics import LinkCollector
from pdd.serving.link_traffic import LinkTraffic
from pdd.serving.metrics import Metrics
from pdd.serving.policy_metrics import PolicyMetrics
from pdd.serving.prompt_scores import score_prompt
from pdd.serving.request import Delta, GenerationRequest, Override
from pdd.serving.request_parts import RunContext
from pdd.serving.run_request import RequestRun
from pdd.serving.shared_prompts import SharedPrompts
from pdd.serving.text.model import TextModel
from pdd.serving.timeline import TimelineRecorder
from pdd.serving.worker_metrics import WorkerCollector
from pdd.serving.worker_pool import WorkerPool
from pddbridge.sampling_params import TokenRecord

# How long closing a generation waits for its task, which bounds its own waits below this.
CANCEL_TIMEOUT_S = 3.0
_MBIT_BYTES = 1e6 / 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """``max_context_tokens``: prompt plus output, of the smallest worker, whose name is ``smallest_worker``."""

    model_name: str
    max_context_tokens: int
    vocab_size: int
    smallest_worker: str


class Coordinator:
    """One per deployment. ``pool`` stays its owner's to close."""

    def __init__(self, config: LaunchConfig, pool: WorkerPool, text_model: TextModel | None, metrics: Metrics) -> None:
        """``text_model`` None: only requests for tokens are served."""
        self._config = config
        self._pool = pool
        self._text_model = text_model
        self.metrics = metrics
        links, prompts, learned = LinkEstimate(_declared_rates(config)), SharedPrompts(), Learned(config.policy)
        policy_metrics = PolicyMetrics(metrics.registry, learned)
        traffic = LinkTraffic(config, pool, links)
        self._background = Background(config.policy.background, pool, traffic, prompts, learned, metrics, policy_metrics)
        self._decisions = DecisionLog(config.policy.num_decisions_kept, config.policy.ttft_target_s, learned, policy_metrics)
        self._admission = AdmissionQueue(config.flow, lambda: main_room(pool, config.flow.rows_factor), metrics.registry)
        self._context = RunContext(config, pool, links, metrics, prompts, learned, self._background, traffic, self._admission.granted)
        self._running: dict[str, asyncio.Task[None]] = {}
        metrics.registry.register(WorkerCollector(pool))
        metrics.registry.register(LinkCollector(pool))

    @property
    def limits(self) -> Limits:
        smallest = self._pool.smallest_context()
        info = smallest.info
        return Limits(info.model_name, info.max_context_tokens, info.vocab_size, smallest.name)

    def unhealthy_workers(self) -> tuple[str, ...]:
        """Names of workers that cannot be used now; empty when the service is healthy."""
        return self._pool.unhealthy()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Deltas in log order. The last one has the finish reason and the timeline.

        Raises PddError: before the first delta for a request that is refused, later when it cannot go on. Closing the generator, or
        cancelling the task that iterates it, lets go of every worker at once. A slow reader does not slow the request down.
        """
        timeline = TimelineRecorder()
        try:
            self._admit(request)
        except PddError as error:
            self.metrics.requests.labels(error.code.name.lower()).inc()
            raise
        # Bounded by the request's own max_tokens, which the context bounds: so a slow reader holds memory here, and no worker.
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        task = asyncio.create_task(self._run(request, timeline, deltas))
        self._running[request.request_id] = task
        self.metrics.running.set(len(self._running))
        task.add_done_callback(lambda ended: self._ended(request.request_id, ended))
        task.add_done_callback(lambda _: deltas.put_nowait(None))  # however it ended: nobody waits for a request that is over
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            await asyncio.wait({task})
            if task.cancelled():
                raise PddError(Code.UNAVAILABLE, "the service is shutting down")
            task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
            if task.done():
                self._ended(request.request_id, task)  # now, not when its callback gets its turn: the caller may ask for the next at once

    @property
    def latest_decisions(self) -> tuple[DecisionRecord, ...]:
        """Of the latest requests that have ended, oldest first: what was decided, why, and what came of it."""
        return self._decisions.latest

    async def close(self) -> None:
        """Cancel what is running and wait, bounded, until every worker was told."""
        tasks = set(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
        await self._background.close()

    async def _run(self, request: GenerationRequest, timeline: TimelineRecorder, deltas: asyncio.Queue[Delta | None]) -> None:
        outcome = "cancelled"
        self.metrics.prompt_tokens.inc(len(request.prompt_ids))
        try:
            emit: Callable[[Delta], None] = deltas.put_nowait
            async with self._admission.admitted(request) as waited_s:
                request = replace(request, timeout_s=max(0.001, request.timeout_s - waited_s))
                if request.prompt_logprobs is not None:
                    emit = _WithPrompt(await score_prompt(request, self._pool), emit)
                if request.prompt_only:
                    emit(Delta((), "", 0, "main", "length", timeline.build()))
                    outcome = "length"
                else:
                    acceptor = Acceptor(request, self._text_model)
                    await RequestRun(request, self._context, acceptor, timeline, emit).run()
                    outcome = acceptor.finish_reason or "stop"
        except PddError as error:
            if error.code is Code.RESOURCE_EXHAUSTED and error.retry_after_s is None:
                error.retry_after_s = self._admission.retry_after_s
            outcome = error.code.name.lower()
            usage = (len(request.prompt_ids), sum(timeline.tokens.values()))
            _log.warning("request %s ended with %s: %s; prompt tokens %d, generated %d", request.request_id, error.code.name, error, *usage)
            raise
        except Exception as error:
            outcome = "internal"
            _log.exception("request %s met a fault of ours", request.request_id)
            raise PddError(Code.INTERNAL, f"request {request.request_id} met an internal error: {type(error).__name__}") from error
        finally:
            self.metrics.ended(outcome, timeline.build())
            self._decisions.ended(request, timeline, outcome)
            deltas.put_nowait(None)

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(request_id) is task:
            del self._running[request_id]
        self.metrics.running.set(len(self._running))

    def _admit(self, request: GenerationRequest) -> None:
        """Everything that can be refused before a worker hears of the request."""
        if len(self._running) >= self._config.serving.max_queued_requests:
            raise PddError(
                Code.RESOURCE_EXHAUSTED,
                f"{len(self._running)} requests are running, allowed are {self._config.serving.max_queued_requests}",
                retry_after_s=self._admission.retry_after_s,
            )
        if request.request_id in self._running:
            raise PddError(Code.INVALID_ARGUMENT, f"request_id: {request.request_id!r} is running already", "request_id")
        limits = self.limits
        check_prompt(request.prompt_ids, limits)
        check_length(len(request.prompt_ids), request.sampling.max_tokens, limits)
        if request.override != Override() and not self._config.serving.allow_override:
            raise PddError(Code.PERMISSION_DENIED, "override: pipeline and handoff are decided by the service", "override")
        handoff_at = request.override.handoff_at
        if handoff_at is not None and (handoff_at < 0 or request.override.pipeline in ("direct", "local")):
            message = f"handoff_at: given {handoff_at}, allowed from 0 on and not with pipeline 'direct' or 'local'"
            raise PddError(Code.INVALID_ARGUMENT, message, "handoff_at")
        if request.want_text and self._text_model is None:
            raise PddError(Code.INVALID_ARGUMENT, "text: no text model is loaded, only token ids are served", "want_text")
        if request.stop_strings and not request.want_text:
            raise PddError(Code.INVALID_ARGUMENT, "stop: no text is made of a request for tokens only", "stop")


class _WithPrompt:
    """Emits, with the prompt's records in the first delta."""

    def __init__(self, records: tuple[TokenRecord, ...], emit: Callable[[Delta], None]) -> None:
        self._records: tuple[TokenRecord, ...] | None = records
        self._emit = emit

    def __call__(self, delta: Delta) -> None:
        records, self._records = self._records, None
        self._emit(delta if records is None else replace(delta, prompt_records=records))


def check_prompt(prompt_ids: tuple[int, ...], limits: Limits) -> None:
    """Raises PddError INVALID_ARGUMENT for an empty prompt or an id outside the vocabulary."""
    if not prompt_ids:
        raise PddError(Code.INVALID_ARGUMENT, "prompt: given no tokens, at least one is needed", "prompt")
    for index, token_id in enumerate(prompt_ids):
        if not 0 <= token_id < limits.vocab_size:
            raise PddError(
                Code.INVALID_ARGUMENT, f"prompt[{index}]: given {token_id}, allowed token ids 0 to {limits.vocab_size - 1}", "prompt"
            )


def check_length(prompt_tokens: int, max_tokens: int, limits: Limits) -> None:
    """Raises PddError INVALID_ARGUMENT when prompt, or prompt plus output, does not fit the smallest worker."""
    room = f"{limits.max_context_tokens} tokens of context ({limits.smallest_worker} is the smallest)"
    if prompt_tokens + 1 > limits.max_context_tokens:
        raise PddError(Code.INVALID_ARGUMENT, f"prompt: given {prompt_tokens} tokens, there is no room for an answer in {room}", "prompt")
    if prompt_tokens + max_tokens > limits.max_context_tokens:
        raise PddError(
            Code.INVALID_ARGUMENT,
            f"max_tokens: given {max_tokens}, with a prompt of {prompt_tokens} tokens that is over {room}",
            "max_tokens",
        )


def _declared_rates(config: LaunchConfig) -> dict[tuple[str, str], float]:
    """Bytes per second of links whose rate the launch config states, both ways: what is believed until transfers were measured."""
    rates = {}
    for link in config.links:
        if link.emulate is not None:
            here, there = link.between
            rates[here, there] = rates[there, here] = link.emulate.rate_mbit_s * _MBIT_BYTES
    return rates
