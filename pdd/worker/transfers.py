"""KV in and out of this worker: the links' callbacks on one side, the step thread's commands on the other. Owns transfer ids and pushes.

In: a frame -> PlaceKV to the step thread -> the link acknowledges. Out: KVRead from the step thread -> the link -> PushAcknowledged back,
so that the step thread reads on. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from crc32c import crc32c

from pdd.errors import Code
from pdd.worker import messages as m
from pdd.worker.kv_codecs import CodecChoice
from pdd.worker.kv_links import KVLinks, Receiver
from pdd.worker.link_rules import SharedLinks
from pdd.worker.step_loop import StepLoop
from pddbridge.codecs import CodecId
from pddbridge.engine import KVBlock
from pddbridge.kv_spec import TokenRange
from pddbridge.link_schedule import Priority
from pddbridge.links.nixl import NixlAgent
from pddbridge.links.slot_loans import Lend
from pddbridge.links.tcp import Handshake, OutgoingTransfer, TransferFailed, TransferReport
from pddbridge.native.checksum import Checksum
from pddbridge.native.copy import Copy, plain_copy
from pddbridge.tls import LinkTls

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushSpec:
    """A receiver and what it lacks, as the coordinator told: positions ``tokens`` to ``transfer_id`` of the process with ``epoch``.
    ``link``: of :data:`pdd.worker.kv_links.LINK_CHOICES`. ``nixl_port``: 0 if the receiver has none.
    ``priority``, ``deadline_s`` from now: for whoever shares the link.
    """

    target: str
    host: str
    port: int
    epoch: int
    transfer_id: int
    tokens: TokenRange
    link: str = "tcp"
    nixl_port: int = 0
    priority: Priority = Priority.NORMAL
    deadline_s: float | None = None


@dataclass(frozen=True)
class Pushed:
    """``target`` acknowledged everything. ``num_bytes``: of KV as stored; ``wire_bytes``: of the payloads that carried it."""

    target: str
    num_tokens: int
    num_bytes: int
    wire_bytes: int
    codec: CodecId


@dataclass(frozen=True)
class PushFailed:
    """``target`` will not get the rest. ``code`` is a gRPC status name."""

    target: str
    code: str
    message: str


PushOutcome = Pushed | PushFailed


class KVTraffic:
    """The worker's receiving and sending ends. ``step_loop`` is the one whose engine's KV ``handshake`` describes. What
    follows as :class:`KVLinks` says.
    """

    def __init__(
        self,
        handshake: Handshake,
        step_loop: StepLoop,
        nixl: NixlAgent | None = None,
        codecs: CodecChoice | None = None,
        peers: Collection[str] | None = None,
        tls: LinkTls | None = None,
        remote: Collection[str] = (),
        shared: SharedLinks | None = None,
        checksum: Checksum = crc32c,
        copy: Copy = plain_copy,
        fallbacks: Mapping[str, int] | None = None,
    ) -> None:
        self._step_loop = step_loop
        ends = (self._place, self._complete, self._failed)
        self._links = KVLinks(handshake, *ends, nixl, codecs, peers, tls, remote, shared, checksum, copy, fallbacks)
        self._owners: dict[int, str] = {}  # transfer id -> request id
        self._last_id = 0

    async def start(self, host: str, port: int) -> int:
        """Listen for frames; returns the port. Raises OSError."""
        return await self._links.start(host, port)

    async def close(self) -> None:
        await self._links.close()

    @property
    def links(self) -> KVLinks:
        """For what they count."""
        return self._links

    def expect(self, request_id: str, tokens: TokenRange) -> int:
        """Take frames of ``tokens`` for the request from now on; returns the transfer id to tell the sender."""
        self._last_id += 1
        self._links.incoming.expect(self._last_id, tokens)
        self._owners[self._last_id] = request_id
        return self._last_id

    async def fence(self, transfer_id: int) -> None:
        """Returns when no writer can touch the transfer's pages any more."""
        await self._links.incoming.fence(transfer_id)
        self._owners.pop(transfer_id, None)

    def push(self, request_id: str, spec: PushSpec, ended: Callable[[PushOutcome], None]) -> Push:
        """Open a push; ``ended`` is called once, unless it is cancelled. Raises ValueError for an id that is in use."""

        def acked(num_bytes: int) -> None:
            self._step_loop.post(m.PushAcknowledged(request_id, spec.target, num_bytes))

        target = Receiver(spec.target, spec.host, spec.port, spec.nixl_port, spec.epoch)
        transfer, codec = self._links.open(spec.link, target, spec.transfer_id, spec.tokens, acked, spec.priority, spec.deadline_s)
        return Push(request_id, spec.target, transfer, codec, self._step_loop, ended)

    async def _place(self, transfer_id: int, block: KVBlock) -> None:
        done: Future[None] = Future()
        self._step_loop.submit(m.PlaceKV(self._owners[transfer_id], block, done))
        await asyncio.wrap_future(done)

    def _complete(self, transfer_id: int, report: TransferReport) -> None:
        self._step_loop.post(m.TransferComplete(self._owners[transfer_id], report.bytes, report.wire_bytes))

    def _failed(self, transfer_id: int, failure: TransferFailed) -> None:
        self._step_loop.post(m.FailRequest(self._owners[transfer_id], Code[failure.code], f"incoming transfer: {failure.message}"))


class Push:
    """One outgoing transfer of one request."""

    def __init__(
        self,
        request_id: str,
        target: str,
        transfer: OutgoingTransfer,
        codec: CodecId,
        step_loop: StepLoop,
        ended: Callable[[PushOutcome], None],
    ) -> None:
        self._request_id = request_id
        self._target = target
        self._transfer = transfer
        self._codec = codec
        self._step_loop = step_loop
        self._ended = ended
        self._waiting: asyncio.Task[None] | None = asyncio.create_task(self._wait(), name=f"push-{request_id}-{target}")

    def send(self, blocks: Iterable[KVBlock]) -> None:
        """Queue blocks that the step thread read for this target."""
        for block in blocks:
            self._transfer.push(block)

    @property
    def lend(self) -> Lend | None:
        """Memory of the link, in which the step thread may make the blocks."""
        return self._transfer.lend

    def set_priority(self, priority: Priority) -> None:
        """For what it has yet to send."""
        self._transfer.priority = priority

    def cancel(self) -> None:
        """Send nothing more. Idempotent."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None  # a cancelled task refers to whom it ran for
        self._transfer.cancel()

    async def _wait(self) -> None:
        try:
            report = await self._transfer.done()
            outcome: PushOutcome = Pushed(self._target, len(report.tokens), report.bytes, report.wire_bytes, self._codec)
        except TransferFailed as failure:
            outcome = PushFailed(self._target, failure.code, failure.message)
        self._step_loop.post(m.PushEnded(self._request_id, self._target))
        self._ended(outcome)
