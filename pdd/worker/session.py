"""One Attach stream on the event loop: turns the step thread's events into messages, and ends everything the request holds, once.

Order of the end: pushes cancelled, incoming transfer fenced and drained, then the step thread returns the pages. So no page goes back to
the pool while somebody can still write it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from pdd.errors import Code
from pdd.worker import messages as m
from pdd.worker.open_command import Opening, Receivers, parse_target
from pdd.worker.step_loop import StepLoop, StepLoopEndedError
from pdd.worker.transfers import KVTraffic, Push, Pushed, PushOutcome
from pddbridge.codecs import CodecId
from pddbridge.rpc.convert import priority_from_proto, record_to_proto
from pddbridge.rpc.gen import worker_pb2


class Session:
    """``forget`` is called when the request holds nothing any more. ``receivers``: where KV may be pushed."""

    def __init__(
        self,
        opening: Opening,
        epoch: int,
        step_loop: StepLoop,
        traffic: KVTraffic,
        forget: Callable[[str], None],
        receivers: Receivers = None,
    ) -> None:
        self.request_id = opening.command.request_id
        self.refused: m.Refused | None = None
        self._opening = opening
        self._epoch = epoch
        self._step_loop = step_loop
        self._traffic = traffic
        self._forget = forget
        self._receivers = receivers
        self._pushes: dict[str, Push] = {}
        self._transfer_id: int | None = None
        # Bounded by one request's tokens and the commands for it. A coordinator that does not read holds this, and the worker goes on.
        self._outgoing: asyncio.Queue[worker_pb2.WorkerEvent | None] = asyncio.Queue()
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Hand the request to the step thread. Raises ValueError when a push cannot be opened; ``end`` it then as ever."""
        for spec in self._opening.pushes:
            self._pushes[spec.target] = self._traffic.push(self.request_id, spec, self._push_ended)
        command = self._opening.command
        push_to = tuple(replace(to, lend=self._pushes[to.target].lend) for to in command.push_to)
        self.submit(replace(command, push_to=push_to))

    def submit(self, command: m.Command) -> None:
        """A command for this request. Where the step loop has ended, the request ends too."""
        try:
            self._step_loop.submit(command)
        except StepLoopEndedError as error:
            self.deliver(m.Failed(Code.UNAVAILABLE, str(error)))

    def add_target(self, target: worker_pb2.PushTarget) -> None:
        """One more receiver of the prompt's KV. One that cannot be ends the request."""
        if self._ending is not None:
            return
        command = self._opening.command
        try:
            if target.target in self._pushes or target.target in self._opening.complete_targets:
                raise ValueError(f"add_target.target: {target.target!r} is pushed to already")
            spec = parse_target(target, len(command.prompt_ids), self._receivers)
            if spec is None:
                self._push_ended(Pushed(target.target, 0, 0, 0, CodecId.RAW))
                return
            push = self._traffic.push(self.request_id, spec, self._push_ended)
        except ValueError as error:
            self.submit(m.FailRequest(self.request_id, Code.INVALID_ARGUMENT, str(error)))
            return
        self._pushes[spec.target] = push
        self.submit(m.AddPush(self.request_id, m.PushTo(spec.target, spec.tokens.start, push.lend)))

    def set_priority(self, command: worker_pb2.SetPriority) -> None:
        """For what the push has yet to send. A target that nothing is pushed to, any more or at all, does not mind; a class that is not
        known ends the request.
        """
        try:
            priority = priority_from_proto(command.priority, "set_priority.priority")
        except ValueError as error:
            self.submit(m.FailRequest(self.request_id, Code.INVALID_ARGUMENT, str(error)))
            return
        if (push := self._pushes.get(command.target)) is not None:
            push.set_priority(priority)

    async def next_event(self) -> worker_pb2.WorkerEvent | None:
        """The next message for the coordinator; None after the last. A failure is told only after all pages are back."""
        message = await self._outgoing.get()
        if message is not None and message.WhichOneof("event") == "failed" and not message.failed.target:
            await asyncio.shield(self.end())
        return message

    def deliver(self, event: m.Event) -> None:
        """An event of the step thread. After the end they are late and dropped."""
        if self._ending is not None:
            return
        match event:
            case m.Refused():
                self.refused = event
                self._outgoing.put_nowait(None)
            case m.Reserved():
                if event.missing is not None:
                    self._transfer_id = self._traffic.expect(self.request_id, event.missing)
                reserved = worker_pb2.Reserved(hit_tokens=event.hit_tokens, transfer_id=self._transfer_id or 0, epoch=self._epoch)
                self._outgoing.put_nowait(worker_pb2.WorkerEvent(reserved=reserved))
                for target in self._opening.complete_targets:
                    self._push_ended(Pushed(target, 0, 0, 0, CodecId.RAW))
            case m.KVRead():
                for target in event.targets:
                    self._pushes[target].send(event.blocks)
            case m.Failed():
                self._outgoing.put_nowait(to_proto(event))
                self._outgoing.put_nowait(None)
            case _:
                self._outgoing.put_nowait(to_proto(event))

    def end(self) -> asyncio.Task[None]:
        """Let go of everything. Idempotent, in every state; the task finishes when the pages are back."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name=f"end-{self.request_id}")
        return self._ending

    async def _end(self) -> None:
        self._outgoing.put_nowait(None)
        for push in self._pushes.values():
            push.cancel()
        if self._transfer_id is not None:
            await self._traffic.fence(self._transfer_id)
        await self._step_loop.close(self.request_id)
        self._pushes.clear()  # they refer to this session, and hold what their transfers do
        self._forget(self.request_id)

    def _push_ended(self, outcome: PushOutcome) -> None:
        match outcome:
            case Pushed():
                moved = {"tokens": outcome.num_tokens, "bytes": outcome.num_bytes, "wire_bytes": outcome.wire_bytes}
                pushed = worker_pb2.Pushed(target=outcome.target, **moved, codec=outcome.codec.name)
                self._outgoing.put_nowait(worker_pb2.WorkerEvent(pushed=pushed))
            case _:
                message = f"push to {outcome.target}: {outcome.message}"
                failed = worker_pb2.Failed(code=outcome.code, message=message, target=outcome.target)
                self._outgoing.put_nowait(worker_pb2.WorkerEvent(failed=failed))


def to_proto(event: m.Event) -> worker_pb2.WorkerEvent:
    """The events that map one to one. The others are the session's."""
    match event:
        case m.Prefilled():
            return worker_pb2.WorkerEvent(prefilled=worker_pb2.Prefilled(computed_tokens=event.computed_tokens))
        case m.KvComplete():
            complete = worker_pb2.KvComplete(
                received_tokens=event.received_tokens,
                received_bytes=event.received_bytes,
                received_wire_bytes=event.received_wire_bytes,
            )
            return worker_pb2.WorkerEvent(kv_complete=complete)
        case m.Tokens():
            records = [record_to_proto(record) for record in event.records]
            return worker_pb2.WorkerEvent(tokens=worker_pb2.Tokens(position=event.position, records=records))
        case m.PromptScores():
            records = [record_to_proto(record) for record in event.records]
            return worker_pb2.WorkerEvent(prompt_scores=worker_pb2.PromptScores(position=event.position, records=records))
        case m.Ingested():
            return worker_pb2.WorkerEvent(ingested=worker_pb2.Ingested(length=event.length))
        case m.Sealed():
            return worker_pb2.WorkerEvent(sealed=worker_pb2.Sealed(length=event.length))
        case m.Failed():
            return worker_pb2.WorkerEvent(failed=worker_pb2.Failed(code=event.code.name, message=event.message))
        case m.Refused() | m.Reserved() | m.KVRead():
            raise AssertionError(f"{type(event).__name__} is the session's")
