"""One request's hold on one worker: a typed wrapper over one ``Attach`` stream. Ending the stream, however it ends, returns the pages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from pdd.errors import Code
from pdd.serving.worker_events import Event, Failed, KvComplete, Prefilled, Proposed, Sealed, code_from_name, event_from_proto
from pddbridge.link_schedule import Priority
from pddbridge.rpc.convert import priority_to_proto
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc

# How long a worker may take to end its side after ours is closed, before the call is cancelled.
CLOSE_TIMEOUT_S = 1.0


class TokenDebt:
    """Whether a worker owes tokens, and since when nothing came. It does once the prompt's KV is there and it was told to decode, until it
    has sealed. What may take long (a place, a prefill, a transfer) is no debt: there the worker's heartbeat and the deadline speak.
    """

    def __init__(self) -> None:
        self._decodes = False
        self._has_kv = False
        self._since: float | None = None

    def told(self, decode: bool, now: float) -> None:
        """It was opened, or was given tokens of the log."""
        self._decodes = self._decodes or decode
        self._begin(now)

    def heard(self, event: Event, now: float) -> None:
        match event:
            case Prefilled() | KvComplete():
                self._has_kv = True
            case Sealed():
                self._decodes = False
            case Proposed():
                self._since = None
            case _:
                return
        if not (self._decodes and self._has_kv):
            self._since = None
        self._begin(now)

    def silent_s(self, now: float) -> float:
        """For how long it has owed tokens and sent none; 0 where it owes none."""
        return 0.0 if self._since is None else now - self._since

    def _begin(self, now: float) -> None:
        if self._decodes and self._has_kv and self._since is None:
            self._since = now


class WorkerStream:
    """Commands never wait: they are queued and sent in order. Events are iterated by one task, once and to the end (the status of a call
    only comes after its messages); the last one is a Failed unless we closed the stream ourselves.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerStub, vocab_size: int, timeout_s: float) -> None:
        """``timeout_s``: the call's own deadline, after which both sides drop it."""
        # A few commands per request, and its log once or twice: never more than its context.
        self._commands: asyncio.Queue[worker_pb2.WorkerCommand | None] = asyncio.Queue()
        self._vocab_size = vocab_size
        self._closed = False
        self._lost: Failed | None = None
        self._debt = TokenDebt()
        self._call = stub.Attach(self._requests(), timeout=timeout_s)

    def open(self, command: worker_pb2.Open) -> None:
        self._debt.told(command.decode, time.monotonic())
        self._send(worker_pb2.WorkerCommand(open=command))

    def ingest(self, position: int, token_ids: Sequence[int], decode: bool) -> None:
        """The next log positions; with ``decode`` the worker proposes from ``position + len(token_ids)`` on."""
        self._debt.told(decode, time.monotonic())
        self._send(worker_pb2.WorkerCommand(ingest=worker_pb2.Ingest(position=position, token_ids=token_ids, decode=decode)))

    def set_priority(self, target: str, priority: Priority) -> None:
        """The push to ``target`` has another class from now on."""
        self._send(worker_pb2.WorkerCommand(set_priority=worker_pb2.SetPriority(target=target, priority=priority_to_proto(priority))))

    def add_target(self, target: worker_pb2.PushTarget) -> None:
        """Prefill is to push to one more."""
        self._send(worker_pb2.WorkerCommand(add_target=target))

    def seal(self) -> None:
        self._send(worker_pb2.WorkerCommand(seal=worker_pb2.Seal()))

    async def events(self) -> AsyncIterator[Event]:
        """Typed events until the stream ends. A broken connection, a deadline and a worker's nonsense come as Failed; nothing is raised."""
        try:
            async for message in self._call:
                event = event_from_proto(message, self._vocab_size)
                self._debt.heard(event, time.monotonic())
                yield event
                if isinstance(event, Failed):
                    return
        except grpc.aio.AioRpcError as error:
            if self._lost is not None and not self._closed:
                yield self._lost
            elif not self._closed:
                # CANCELLED, and not by us: the worker's server is shutting down.
                died = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                code = Code.UNAVAILABLE if died else code_from_name(error.code().name)
                yield Failed(code, error.details() or error.code().name, died)
            return
        except asyncio.CancelledError:
            # A call that we cancelled ourselves ends its readers this way; a reader that is cancelled from outside must see it.
            task = asyncio.current_task()
            if self._lost is not None and not self._closed and (task is None or not task.cancelling()):
                yield self._lost
            elif not self._closed:
                raise
            return
        except ValueError as error:
            yield Failed(Code.INTERNAL, f"unreadable event: {error}", died=False)
            return
        if not self._closed:
            yield Failed(Code.UNAVAILABLE, "the worker ended the stream", died=True)

    @property
    def silent_s(self) -> float:
        """For how long the worker has owed tokens here and sent none."""
        return self._debt.silent_s(time.monotonic())

    def lose(self, failure: Failed) -> None:
        """The worker will not be heard any more, though nothing has closed: ``failure`` is the last event, and the call is cancelled."""
        if not self._closed and self._lost is None:
            self._lost = failure
            self._commands.put_nowait(None)
            self._call.cancel()

    def abort(self) -> None:
        """End the stream at once, without waiting for anything. May be called in any state, any number of times."""
        self._closed = True
        # The sentinel too: grpc leaves its request task waiting when the worker's side has ended already.
        self._commands.put_nowait(None)
        self._call.cancel()

    async def close(self) -> None:
        """End the stream in order: half-close, wait briefly for the worker's side, cancel if it does not come."""
        if not self._closed:
            self._closed = True
            self._commands.put_nowait(None)
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await self._call.code()
            finally:
                self._call.cancel()

    def _send(self, command: worker_pb2.WorkerCommand) -> None:
        if not self._closed:
            self._commands.put_nowait(command)

    async def _requests(self) -> AsyncIterator[worker_pb2.WorkerCommand]:
        while (command := await self._commands.get()) is not None:
            yield command
