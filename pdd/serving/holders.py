"""The workers that hold something for one request: opened, listened to through one inbox, and all let go of at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdd.errors import Code, PddError
from pdd.policy.failover import HolderState
from pdd.serving.pooled_worker import PooledWorker
from pdd.serving.request import GenerationRequest, Origin
from pdd.serving.worker_events import Event, Failed, Reserved
from pdd.serving.worker_stream import WorkerStream
from pddbridge.rpc.convert import params_to_proto
from pddbridge.rpc.gen import worker_pb2

Part = Literal["prefill", "relay", "main"]
# How long the end of a request waits for its streams to end before they are cancelled and left.
RELEASE_TIMEOUT_S = 2.0
MAX_ATTEMPTS = 12


@dataclass(eq=False)
class Holder:
    """One worker's part in a request. ``reserved``: its first event, None before · ``kv_here``: its prompt KV is complete, by its own
    word · ``acknowledged``: prefill was told so · ``computes``: it computes what it lacks instead of awaiting a transfer.
    """

    part: Part
    worker: PooledWorker
    stream: WorkerStream
    computes: bool
    reserved: Reserved | None = None
    kv_here: bool = False
    acknowledged: bool = False
    released: bool = False

    @property
    def origin(self) -> Origin:
        """Who made its tokens, for clients: what the worker is for, even where it stands in for another."""
        return "relay" if self.worker.place.role == "relay" else "main"

    @property
    def state(self) -> HolderState:
        return "ready" if self.kv_here or self.acknowledged or self.computes else "awaiting"

    def miss_tokens(self, prompt_tokens: int) -> int:
        """Prompt tokens to be received. The last prompt token is the decode worker's own first input, so it never counts."""
        assert self.reserved is not None
        return max(0, prompt_tokens - 1 - self.reserved.hit_tokens)


@dataclass(frozen=True)
class Attach:
    """What differs between the parts when a worker is opened; see ``pdd.v1.Open``."""

    part: Part
    computes: bool
    decode: bool
    push_to: tuple[worker_pb2.PushTarget, ...] = ()
    log_ids: Sequence[int] = ()
    max_propose_tokens: int | None = None
    prompt_logprobs: int | None = None


class Holders:
    """All holders of one request. Every wait ends at the request's deadline."""

    def __init__(self, request: GenerationRequest, max_attempts: int = MAX_ATTEMPTS) -> None:
        """``max_attempts``: workers that may be opened over the request's life, so that failures cannot feed on themselves."""
        self.request = request
        self._max_attempts = max_attempts
        self._deadline = time.monotonic() + request.timeout_s
        # Bounded by what workers may say of one request: a few events each, and its tokens. Its task waits for nobody else.
        self._inbox: asyncio.Queue[tuple[Holder, Event]] = asyncio.Queue()
        self._held: dict[Holder, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._num_opened = 0
        self.failed_on: frozenset[str] = frozenset()  # names of workers that broke a stream of this request

    def open(self, worker: PooledWorker, attach: Attach) -> Holder:
        """Returns at once; what becomes of it arrives through ``next``. Raises PddError UNAVAILABLE after too many."""
        if self._num_opened >= self._max_attempts:
            raise PddError(Code.UNAVAILABLE, f"given up after {self._num_opened} attempts on workers")
        remaining_s = self.remaining_s
        stream = worker.attach(remaining_s)
        holder = Holder(attach.part, worker, stream, attach.computes)
        stream.open(
            worker_pb2.Open(
                # Unique on every worker: a second attach may reach a worker that has not yet forgotten the first.
                request_id=f"{self.request.request_id}.{self._num_opened}",
                tenant=self.request.tenant,
                prompt_ids=self.request.prompt_ids,
                sampling=params_to_proto(self.request.sampling),
                kv_source=worker_pb2.KV_SOURCE_COMPUTE if attach.computes else worker_pb2.KV_SOURCE_TRANSFER,
                push_to=attach.push_to,
                decode=attach.decode,
                log_ids=attach.log_ids,
                timeout_s=remaining_s,
                max_propose_tokens=attach.max_propose_tokens,
                prompt_logprobs=attach.prompt_logprobs,
            )
        )
        self._num_opened += 1
        self._held[holder] = asyncio.create_task(self._listen(holder))
        return holder

    async def next(self, until: float | None = None) -> tuple[Holder, Event] | None:
        """The next event of a holder that was not released. None once the monotonic clock reaches ``until``.

        Raises PddError DEADLINE_EXCEEDED at the request's deadline.
        """
        end = self._deadline if until is None else min(until, self._deadline)
        while True:
            try:
                # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    holder, event = await self._inbox.get()
            except TimeoutError:
                self.check_deadline()
                return None
            if not holder.released:
                return holder, event

    def check_deadline(self) -> None:
        """Raises PddError DEADLINE_EXCEEDED once the request's time is over."""
        if time.monotonic() >= self._deadline:
            raise PddError(Code.DEADLINE_EXCEEDED, f"not finished after {self.request.timeout_s:g} s")

    def tell(self, holder: Holder, event: Event) -> None:
        """Put ``event`` behind those that ``holder`` sent."""
        self._inbox.put_nowait((holder, event))

    @property
    def remaining_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def release(self, holder: Holder) -> None:
        """Let go of it in order, in the background. Its later events are not delivered."""
        if not holder.released:
            holder.released = True
            closing = asyncio.create_task(holder.stream.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def drop(self, holder: Holder) -> None:
        """Let go of it at once: it is broken, or nothing of it is wanted."""
        holder.released = True
        holder.stream.abort()

    async def release_all(self) -> None:
        """End of the request: all streams end in order, or are cancelled after a bounded time."""
        for holder in tuple(self._held):
            self.release(holder)
        await self._wait_ended()

    async def drop_all(self) -> None:
        """As ``release_all`` without waiting for any worker's answer. The streams have ended before the first await."""
        for holder in tuple(self._held):
            self.drop(holder)
        await self._wait_ended()

    async def _wait_ended(self) -> None:
        tasks = {*self._held.values(), *self._closing}
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=RELEASE_TIMEOUT_S)
            for task in pending:
                task.cancel()

    async def _listen(self, holder: Holder) -> None:
        try:
            async for event in holder.stream.events():
                holder.worker.heard(holder.stream, event)
                if isinstance(event, Failed):
                    self.failed_on |= {holder.worker.name}
                self._inbox.put_nowait((holder, event))
        finally:
            holder.stream.abort()
            holder.worker.detach(holder.stream)
            del self._held[holder]
