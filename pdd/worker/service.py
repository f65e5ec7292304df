"""The gRPC service ``pdd.v1.Worker``: Info, Ledger, Attach. Owns the sessions; everything else is a message to the step loop.

``Attach`` refuses with a status what it does not take (bad arguments, a request id in use, a full queue). A request it has taken ends
with the stream or with a Failed event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from pdd.errors import Code, PddError
from pdd.loop_lag import BOUNDS_S, LagHistogram, watch_loop
from pdd.worker import messages as m
from pdd.worker.kv_links import LinkState
from pdd.worker.open_command import Receivers, parse_open
from pdd.worker.session import Session
from pdd.worker.step_loop import EngineFacts, Events, StepLoop, StepLoopEndedError
from pdd.worker.transfers import KVTraffic
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc
from pddbridge.rpc.peers import PeerGuard

logger = logging.getLogger(__name__)

AttachContext = grpc.aio.ServicerContext[worker_pb2.WorkerCommand, worker_pb2.WorkerEvent]


@dataclass(frozen=True)
class Runtime:
    """What there is once the engine is warm. ``receivers``: where KV may be pushed, as :mod:`pdd.worker.open_command` says."""

    facts: EngineFacts
    model_name: str
    fingerprint: str
    step_loop: StepLoop
    traffic: KVTraffic
    receivers: Receivers = None

    @property
    def max_context_tokens(self) -> int:
        return min(self.facts.config.max_context_tokens, self.facts.spec.max_context_tokens)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answers from the start; takes requests between ``begin`` and ``end``. ``epoch``: drawn anew at every start of the process.
    ``draining``: it is about to leave, and says so to whoever asks; what comes nevertheless is served.
    """

    def __init__(self, name: str, epoch: int, guards: Sequence[PeerGuard] = ()) -> None:
        self._name = name
        self._guards = guards
        self._epoch = epoch
        self._runtime: Runtime | None = None
        self._sessions: dict[str, Session] = {}
        self._lag = LagHistogram()
        self._watching: asyncio.Task[None] | None = None
        self.draining = False

    @property
    def epoch(self) -> int:
        return self._epoch

    def begin(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._watching = asyncio.create_task(watch_loop(self._lag.observe), name="loop-lag")

    async def end(self) -> None:
        """Take nothing more; tell every coordinator and let go of every request."""
        self._runtime = None
        if self._watching is not None:
            self._watching.cancel()
        self.fail_all(Code.UNAVAILABLE, f"worker {self._name} is stopping")
        await asyncio.gather(*(session.end() for session in list(self._sessions.values())))

    def deliver(self, events: Events) -> None:
        """The step loop's events, on the event loop."""
        for request_id, event in events:
            session = self._sessions.get(request_id)
            if session is not None:
                session.deliver(event)

    def fail_all(self, code: Code, message: str) -> None:
        """End every request with a Failed event."""
        self.deliver([(request_id, m.Failed(code, message)) for request_id in list(self._sessions)])

    async def Info(self, request: worker_pb2.InfoRequest, context: grpc.aio.ServicerContext) -> worker_pb2.WorkerInfo:  # noqa: N802
        runtime = self._runtime
        if runtime is None:
            return worker_pb2.WorkerInfo(name=self._name, epoch=self._epoch, ready=False)
        facts, counts = runtime.facts, runtime.step_loop.engine_counts
        return worker_pb2.WorkerInfo(
            name=self._name,
            engine=facts.engine,
            device=facts.config.device,
            epoch=self._epoch,
            fingerprint=runtime.fingerprint,
            model_name=runtime.model_name,
            ready=True,
            page_size=facts.config.page_size,
            num_pages=facts.config.num_pages,
            max_context_tokens=runtime.max_context_tokens,
            kv_bytes_per_token=facts.kv_spec.bytes_per_token,
            vocab_size=facts.spec.vocab_size,
            kv_dtype=facts.kv_spec.dtype,
            layout=f"{facts.layout.name} v{facts.layout.version}, pages of {facts.layout.page_size}, {facts.layout.dtype}",
            num_running=len(self._sessions),
            max_rows=facts.config.max_rows,
            kv_links=runtime.traffic.links.offered,
            nixl_port=runtime.traffic.links.nixl_port,
            links=[_link_state(state) for state in runtime.traffic.links.states()],
            step_age_s=runtime.step_loop.turn_age_s(),
            max_step_tokens=facts.config.max_step_tokens,
            draining=self.draining,
            tokens_chosen=counts.chosen,
            engine_fallbacks=counts.fallbacks,
        )

    async def Ledger(self, request: worker_pb2.LedgerRequest, context: grpc.aio.ServicerContext) -> worker_pb2.LedgerReply:  # noqa: N802
        runtime = self._runtime
        if runtime is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"worker {self._name}: not ready")
        try:
            snapshot = await runtime.step_loop.snapshot()
        except StepLoopEndedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"worker {self._name}: {error}")
        links = runtime.traffic.links
        incoming, outgoing = links.server_counters, links.sender_counters
        return worker_pb2.LedgerReply(
            total_pages=snapshot.pages.total,
            free_pages=snapshot.pages.free,
            cached_pages=snapshot.pages.cached,
            pinned_pages=snapshot.pages.pinned,
            num_requests=snapshot.num_requests,
            num_incoming_transfers=incoming.num_open,
            num_outgoing_transfers=outgoing.num_open,
            computed_prompt_tokens=snapshot.counters.computed_prompt_tokens,
            computed_log_tokens=snapshot.counters.computed_log_tokens,
            sampled_tokens=snapshot.counters.sampled_tokens,
            kv_bytes_received=incoming.bytes_received,
            kv_bytes_sent=outgoing.bytes_sent,
            frames_refused=incoming.frames_refused,
            late_frames_dropped=incoming.late_frames_dropped,
            compilations_after_ready=snapshot.compilations_after_ready,
            steps=snapshot.counters.steps,
            steps_ahead=snapshot.counters.steps_ahead,
            rows_void=snapshot.counters.rows_void,
            preemptions=snapshot.preemptions,
            host_pages=snapshot.host.pages,
            host_bytes=snapshot.host.num_bytes,
            host_capacity_bytes=snapshot.host.capacity_bytes,
            host_hit_tokens=snapshot.host.hit_tokens,
            host_pages_lost=snapshot.host_pages_lost,
            graphed_steps=snapshot.graphed_steps,
            engine_fallbacks=snapshot.engine_fallbacks,
            tokens_chosen=snapshot.tokens_chosen,
            kv_pushes=links.num_opened,
            kv_link_fallbacks=links.fallbacks,
            kv_wire_bytes_received=incoming.wire_bytes_received,
            kv_wire_bytes_sent=outgoing.wire_bytes_sent,
            kv_codecs=links.codecs_chosen,
            kv_coding_ratio=outgoing.bytes_sent / outgoing.wire_bytes_sent if outgoing.wire_bytes_sent else 1.0,
            kv_codecs_declined=outgoing.codecs_declined,
            link_turns=links.link_turns,
            handshakes_refused=incoming.handshakes_refused,
            calls_refused=sum(guard.num_refused for guard in self._guards),
            loop_lag_bounds_s=BOUNDS_S,
            loop_lag_counts=self._lag.counts,
        )

    # Events go out through context.write rather than from a generator: a generator that is suspended when the call is cancelled is
    # ended whenever it is collected, and pages must return at once.
    async def Attach(self, request_iterator: AsyncIterator[worker_pb2.WorkerCommand], context: AttachContext) -> None:  # noqa: N802
        commands = aiter(request_iterator)
        first = await anext(commands, None)
        if first is None:
            return
        try:
            session = self._open(first)
        except PddError as error:
            await context.abort(_status(error.code), error.message)
        reading = asyncio.create_task(self._read(commands, session))
        writing = asyncio.create_task(self._write(session, context))
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.shield(session.end())
            # Not cancelled half way: the stream could then not end in order. Nothing is held any more, so a slow reader may take its time.
            await asyncio.wait((writing,))
        finally:
            reading.cancel()
            writing.cancel()
            await asyncio.shield(session.end())
            await asyncio.gather(reading, writing, return_exceptions=True)
        if session.refused is not None:
            await context.abort(_status(session.refused.code), session.refused.message)

    def _open(self, first: worker_pb2.WorkerCommand) -> Session:
        """Raises PddError; nothing is held then."""
        runtime = self._runtime
        if runtime is None:
            raise PddError(Code.UNAVAILABLE, f"worker {self._name}: not ready")
        if first.WhichOneof("command") != "open":
            raise PddError(Code.INVALID_ARGUMENT, f"the first command must be open, given {first.WhichOneof('command')}")
        opening = parse_open(first.open, runtime.facts.spec.vocab_size, runtime.max_context_tokens, runtime.receivers, time.monotonic())
        request_id = opening.command.request_id
        if request_id in self._sessions:
            raise PddError(Code.INVALID_ARGUMENT, f"request_id: {request_id!r} is in use")
        session = Session(opening, self._epoch, runtime.step_loop, runtime.traffic, self._forget, runtime.receivers)
        self._sessions[request_id] = session
        try:
            session.start()
        except ValueError as error:
            session.end()
            raise PddError(Code.INVALID_ARGUMENT, f"push_to: {error}") from error
        return session

    def _forget(self, request_id: str) -> None:
        del self._sessions[request_id]

    async def _read(self, commands: AsyncIterator[worker_pb2.WorkerCommand], session: Session) -> None:
        """Pass commands on until the coordinator ends its side."""
        async for command in commands:
            match command.WhichOneof("command"):
                case "ingest":
                    ingest = command.ingest
                    session.submit(m.IngestTokens(session.request_id, ingest.position, tuple(ingest.token_ids), ingest.decode))
                case "seal":
                    session.submit(m.SealRequest(session.request_id))
                case "set_priority":
                    session.set_priority(command.set_priority)
                case "add_target":
                    session.add_target(command.add_target)
                case other:
                    session.submit(m.FailRequest(session.request_id, Code.INVALID_ARGUMENT, f"command: given {other} after open"))

    async def _write(self, session: Session, context: AttachContext) -> None:
        """Send events until the last one."""
        while (event := await session.next_event()) is not None:
            await context.write(event)


def _link_state(state: LinkState) -> worker_pb2.LinkState:
    stats = state.stats
    return worker_pb2.LinkState(
        receiver=state.receiver,
        address=state.address,
        link=state.link,
        goodput_bytes_s=stats.goodput_bytes_per_s,
        wire_bytes_s=stats.wire_bytes_per_s,
        round_trip_s=stats.round_trip_s,
        queued_bytes=stats.queued_bytes,
        num_connections=stats.num_connections,
        num_transfers=stats.num_transfers,
        kv_bytes=stats.delivered_bytes,
        kv_wire_bytes=stats.delivered_wire_bytes,
        codec=state.codec.name,
    )


def _status(code: Code) -> grpc.StatusCode:
    return grpc.StatusCode[code.name]
