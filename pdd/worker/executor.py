"""What the step thread does, without the thread: takes commands, runs steps, makes events. Owns all requests, the pages and the engine.

Synchronous and deterministic: given the same engine, commands and clock it does the same. :mod:`pdd.worker.step_loop` decides when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pdd.errors import Code
from pdd.fairness import TenantService
from pdd.worker import messages as m
from pdd.worker.admission import Admission
from pdd.worker.batch import BatchRow
from pdd.worker.kv_memory import KVMemory
from pdd.worker.metrics import Counters, EngineCounts
from pdd.worker.push_feed import PushFeed
from pdd.worker.push_reads import PushReads
from pdd.worker.request import IngestError, Phase, RequestState
from pdd.worker.run_ahead import Flight, Flights
from pdd.worker.scheduler import StepBudget
from pdd.worker.step_rows import StepRows
from pdd.worker.token_sequence import TokenSequence
from pddbridge.engine import Engine, StepResult
from pddbridge.kv_spec import TokenRange

logger = logging.getLogger(__name__)

Emit = Callable[[str, m.Event], None]

# Commands that change nothing of a request which decodes, and may be handled while a step is under way.
_BESIDE_A_STEP: Final = (m.PlaceKV, m.PushAcknowledged, m.PushEnded, m.TakeSnapshot)


@dataclass(frozen=True)
class ExecutorLimits:
    """``max_waiting``: requests that may wait for pages. ``push_window_bytes``: unacknowledged KV per push target.
    ``push_piece_bytes``: about how much one read copies. ``max_decode_wait_chunks``: see :class:`pdd.worker.scheduler.StepBudget`.
    ``host_cache_bytes``: see :class:`pdd.worker.kv_memory.KVMemory`.
    """

    max_waiting: int = 256
    push_window_bytes: int = 64 * 1024 * 1024
    push_piece_bytes: int = 16 * 1024 * 1024
    max_decode_wait_chunks: int = 1
    host_cache_bytes: int = 0


class Executor:
    """``emit(request_id, event)`` is called in the order in which things happen."""

    def __init__(self, engine: Engine, emit: Emit, use_prefix_cache: bool = True, limits: ExecutorLimits = ExecutorLimits()) -> None:
        config = engine.config
        self._engine = engine
        self._emit = emit
        self._limits = limits
        self._max_context_tokens = min(config.max_context_tokens, engine.spec.max_context_tokens)
        self._memory = KVMemory(config.num_pages, config.page_size, engine, use_prefix_cache, limits.host_cache_bytes)
        self._requests: dict[str, RequestState] = {}  # in order of arrival
        self._service = TenantService()
        self._admission = Admission(self._memory, self._service)
        budget = StepBudget(config.max_step_tokens, config.max_rows, limits.max_decode_wait_chunks)
        self._rows = StepRows(self._requests, self._admission, self._service, budget, self._fail)
        self._num_opened = 0
        self._push_reads = PushReads(engine, emit, self._fail)
        self._counters = Counters()
        self._flights = Flights(engine, self._memory.grow, self._step_failed, self._counters)
        self._flight: Flight | None = None
        self._compilations_at_start = engine.stats().compilations

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that is still served; None when there is none."""
        return min((r.deadline for r in self._requests.values() if r.phase is not Phase.OVER), default=None)

    def has_rows(self) -> bool:
        """Whether some request has tokens to compute."""
        return any(r.phase is Phase.ACTIVE and r.num_pending for r in self._requests.values())

    def handle(self, command: m.Command) -> None:
        """Do what ``command`` says. Commands for requests that are unknown or over are late, and dropped."""
        if not isinstance(command, _BESIDE_A_STEP):
            self.land()
        match command:
            case m.OpenRequest():
                self._open(command)
            case m.CloseRequest():
                self._close(command.request_id)
                m.resolve(command.done, None)
            case m.PlaceKV():
                self._place(command)
            case m.TakeSnapshot():
                m.resolve(command.reply, self._snapshot())
            case _:
                request = self._requests.get(command.request_id)
                if request is not None and request.phase is not Phase.OVER:
                    self._handle_for(request, command)

    def expire(self, now: float) -> None:
        """Fail the requests whose deadline has passed."""
        for request in list(self._requests.values()):
            if request.phase is not Phase.OVER and request.deadline <= now:
                self._fail(request, Code.DEADLINE_EXCEEDED, "the request's time on this worker is over")

    def admit_waiting(self) -> None:
        """Give pages to waiting requests in their order, as long as there are enough."""
        while (request := self._admission.first()) is not None:
            try:
                if not self._admission.admit_first(self._requests.values()):
                    return
            except Exception as error:  # the engine's page copy
                logger.exception("request %s: page copy failed", request.request_id)
                self._fail(request, Code.INTERNAL, f"page copy failed: {error}")
                continue
            self._admitted(request)

    def run_step(self) -> bool:
        """Run a planned step or end the one under way, and start the next meanwhile where that can be. False when no row could run."""
        flight, self._flight = self._flight, None
        if flight is None:
            rows = self._rows.plan()
            if not rows:
                self._push_reads.collect()
                return False
            flight = self._flights.start(rows)
            if flight is None:
                return True  # it failed, and its requests with it
        if not (self._admission.num_waiting or flight.leaves_out(self._requests.values())):
            self._flight = self._flights.start_behind(flight)
        self._landed(flight)
        return True

    def land(self) -> None:
        """Have no step under way: whoever comes next may change what its rows are."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._landed(flight)

    def check(self) -> None:
        """Raises LedgerError when the pages do not add up."""
        self._memory.check()

    # Commands.

    def _open(self, command: m.OpenRequest) -> None:
        num_tokens = len(command.prompt_ids) + len(command.log_ids)
        assert command.request_id not in self._requests, f"request {command.request_id!r} opened twice"
        if not self._memory.can_ever_hold(num_tokens):
            self._emit(command.request_id, m.Refused(Code.RESOURCE_EXHAUSTED, f"{num_tokens} tokens never fit this worker's pages"))
            return
        self.admit_waiting()
        if (num_waiting := self._admission.num_waiting) >= self._limits.max_waiting:
            self._emit(command.request_id, m.Refused(Code.RESOURCE_EXHAUSTED, f"{num_waiting} requests wait for pages already"))
            return
        self._num_opened += 1
        request = RequestState(
            request_id=command.request_id,
            tenant=command.tenant,
            prompt_len=len(command.prompt_ids),
            tokens=TokenSequence((*command.prompt_ids, *command.log_ids)),
            params=command.params,
            from_transfer=command.transfer,
            decode=command.decode,
            propose_limit=command.max_propose_tokens,
            max_context_tokens=self._max_context_tokens,
            order=self._num_opened,
            deadline=command.deadline,
            push=self._push_feed(command),
            prompt_logprobs=command.prompt_logprobs,
            given_len=len(command.log_ids),
        )
        self._requests[request.request_id] = request
        self._service.arrive(request.tenant)
        self._admission.enqueue(request)
        self.admit_waiting()

    def _push_feed(self, command: m.OpenRequest) -> PushFeed | None:
        if not command.push_to:
            return None
        feed = self._empty_feed(len(command.prompt_ids) - 1)
        for push in command.push_to:
            feed.add(push.target, push.first_token, push.lend)
        return feed

    def _empty_feed(self, stop: int) -> PushFeed:
        limits = self._limits
        return PushFeed((), stop, self._engine.kv_spec.bytes_per_token, limits.push_window_bytes, limits.push_piece_bytes)

    def _handle_for(self, request: RequestState, command: m.Command) -> None:
        match command:
            case m.IngestTokens():
                try:
                    cut = request.ingest(command.position, command.token_ids, command.decode, self._engine.spec.vocab_size)
                except IngestError as error:
                    self._fail(request, Code.INVALID_ARGUMENT, str(error))
                    return
                if cut is not None:
                    self._memory.rewind(request, request.prompt_len + cut)
                self._progress(request)
            case m.AddPush(push_to=to):
                if request.push is None:
                    request.push = self._empty_feed(request.prompt_kv_len)
                request.push.add(to.target, to.first_token, to.lend)
                self._read_for_push(request)
            case m.SealRequest():
                request.decode = False
                self._emit(request.request_id, m.Sealed(request.log_len))
            case m.FailRequest():
                self._fail(request, command.code, command.message)
            case m.TransferComplete():
                self._transfer_complete(request, command)
            case m.PushAcknowledged():
                if request.push is not None:
                    request.push.acknowledge(command.target, command.num_bytes)
                    self._read_for_push(request)
            case m.PushEnded():
                if request.push is not None:
                    request.push.end(command.target)

    def _close(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._admission.remove(request)
        self._push_reads.forget(request)
        self._service.leave(request.tenant)
        self._memory.release(request)

    def _place(self, command: m.PlaceKV) -> None:
        if not command.done.set_running_or_notify_cancel():
            return
        request = self._requests.get(command.request_id)
        if request is None or request.phase is not Phase.RECEIVING:
            m.fail(command.done, LookupError(f"request {command.request_id!r} awaits no KV"))
            return
        try:
            self._engine.write_kv(np.array(request.pages, dtype=np.int32), command.block)
        except Exception as error:
            logger.exception("request %s: write_kv failed", command.request_id)
            m.fail(command.done, error)
            self._fail(request, Code.INTERNAL, f"placing received KV failed: {error}")
            return
        m.resolve(command.done, None)

    def _transfer_complete(self, request: RequestState, command: m.TransferComplete) -> None:
        assert request.phase is Phase.RECEIVING, f"request {request.request_id!r} is {request.phase}, its transfer completed"
        received = request.prompt_kv_len - request.kv_len
        request.kv_len = request.prompt_kv_len
        request.phase = Phase.ACTIVE
        self._prompt_is_here(request, m.KvComplete(received, command.num_bytes, command.wire_bytes))
        self._progress(request)

    # Progress of one request.

    def _admitted(self, request: RequestState) -> None:
        if request.was_admitted:  # back after a preemption: computed from its tokens, whatever its source was
            request.phase = Phase.ACTIVE
            self._progress(request)
            return
        request.was_admitted = True
        request.hit_tokens = min(request.kv_len, request.prompt_kv_len)
        missing = TokenRange(request.kv_len, request.prompt_kv_len) if request.kv_len < request.prompt_kv_len else None
        if not request.from_transfer:
            missing = None
        request.phase = Phase.ACTIVE if missing is None else Phase.RECEIVING
        self._emit(request.request_id, m.Reserved(request.hit_tokens, missing))
        if request.from_transfer and missing is None:
            self._prompt_is_here(request, m.KvComplete(0, 0, 0))
        self._progress(request)

    def _progress(self, request: RequestState) -> None:
        """Report and decide what follows from the KV, the log or the wish to propose having changed."""
        self._report(request)
        self._settle(request)

    def _report(self, request: RequestState) -> None:
        if request.phase is not Phase.ACTIVE:
            return
        if not request.prompt_reported and request.kv_len >= request.prompt_kv_len:
            self._prompt_is_here(request, m.Prefilled(request.computed_prompt_tokens))
        for length in request.answered_ingests():
            self._emit(request.request_id, m.Ingested(length))
        self._read_for_push(request)

    def _settle(self, request: RequestState) -> None:
        if request.phase is not Phase.OVER and request.settle():
            self._emit(request.request_id, m.Sealed(request.log_len))

    def _prompt_is_here(self, request: RequestState, event: m.Prefilled | m.KvComplete) -> None:
        request.prompt_reported = True
        self._memory.publish(request)  # at once, so that requests that come now find it
        self._emit(request.request_id, event)

    def _landed(self, flight: Flight) -> None:
        result = self._flights.result(flight)
        if result is not None:
            if result.misfed and self._flight is not None:
                self._flight = replace(self._flight, misfed=result.misfed)
            self._push_reads.collect()  # what earlier steps computed: it was copied while this one was planned and dispatched
            self._apply(flight, result)

    def _step_failed(self, rows: Sequence[BatchRow], error: Exception) -> None:
        for row in rows:
            if row.request.phase is not Phase.OVER:
                self._fail(row.request, Code.INTERNAL, f"engine step failed: {error}")

    def _apply(self, flight: Flight, result: StepResult) -> None:
        records, scores = iter(result.records), iter(result.scores)
        self._rows.count_waiting(flight.rows)
        for number, row in enumerate(flight.rows):
            if not flight.counts(number):
                if row.samples:
                    next(records)
                if row.scores:
                    next(scores)
                self._counters.rows_void += flight.ahead
                continue
            request, before = row.request, row.request.kv_len
            if row.scores:
                self._emit(request.request_id, m.PromptScores(before + 1, next(scores)))
            request.kv_len += row.num_tokens
            request.last_step = self._counters.steps
            self._service.serve(request.tenant, row.num_tokens, int(row.samples))
            prompt_tokens = max(0, min(request.kv_len, request.prompt_kv_len) - before)
            request.computed_prompt_tokens += prompt_tokens
            self._counters.computed_prompt_tokens += prompt_tokens
            self._counters.computed_log_tokens += row.num_tokens - prompt_tokens
            record = next(records) if row.samples else None
            self._report(request)  # what the step computed comes before the token it sampled: Prefilled or Ingested, then Tokens
            if record is not None and request.phase is Phase.ACTIVE:
                request.tokens.append(record.token_id)
                self._counters.sampled_tokens += 1
                self._emit(request.request_id, m.Tokens(request.log_len - 1, (record,)))
                self._settle(request)

    def _read_for_push(self, request: RequestState) -> None:
        """Prefix hits are pushed like computed positions."""
        if request.phase is Phase.ACTIVE:
            self._push_reads.start(request)

    def _fail(self, request: RequestState, code: Code, message: str) -> None:
        """End ``request``. Its pages stay until it is closed: a transfer may still write them."""
        self._admission.remove(request)
        self._push_reads.forget(request)
        request.phase = Phase.OVER
        self._emit(request.request_id, m.Failed(code, message))

    def engine_counts(self) -> EngineCounts:
        stats = self._engine.stats()
        return EngineCounts(dict(stats.chosen), dict(stats.fallbacks))

    def _snapshot(self) -> m.Snapshot:
        stats = self._engine.stats()
        return m.Snapshot(
            pages=self._memory.counts(),
            host=self._memory.host_counts(),
            host_pages_lost=self._memory.num_lost,
            num_requests=len(self._requests),
            counters=replace(self._counters),
            preemptions=self._admission.num_preemptions,
            compilations_after_ready=stats.compilations - self._compilations_at_start,
            graphed_steps=stats.graphed_steps,
            engine_fallbacks=dict(stats.fallbacks),
            tokens_chosen=dict(stats.chosen),
        )
