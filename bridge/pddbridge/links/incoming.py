"""The incoming transfers of one process, whatever link their frames come over: placing, completion, fencing, late frames, counters.

A link checks a frame's bytes and hands it over; the answer says what to tell the sender. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from pddbridge.engine import KVBlock
from pddbridge.kv_coverage import Rectangle
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.kv_transfer import Admission, FrameError, Receiver, ReceiverState, TransferFailed, TransferReport, stored_bytes
from pddbridge.kv_wire import FrameHeader, NackReason, Reply

log = logging.getLogger(__name__)

Place = Callable[[int, KVBlock], Awaitable[None]]
Complete = Callable[[int, TransferReport], None]
Failed = Callable[[int, TransferFailed], None]

# Ended transfers that are remembered, so that a frame sent again after a lost acknowledgement is told "placed", not "unknown".
_MAX_REMEMBERED: Final = 256


class IncomingTransfers:
    """``place(transfer_id, block)`` writes a block into pages and returns when it is there; the block's values are good until then.
    ``complete`` and ``failed`` are called on the loop, at most one of them and once per transfer; after ``failed`` the owner still fences.
    """

    def __init__(self, spec: KVSpec, epoch: int, place: Place, complete: Complete, failed: Failed) -> None:
        self.bytes_received = 0
        self.wire_bytes_received = 0
        self.frames_refused = 0
        self.late_frames_dropped = 0
        self._spec = spec
        self._epoch = epoch
        self._place = place
        self._complete = complete
        self._failed = failed
        self._open: dict[int, Receiver] = {}
        self._ended: OrderedDict[int, Receiver] = OrderedDict()
        self._released: dict[int, asyncio.Event] = {}
        self._writers: dict[tuple[int, object], asyncio.Task[None]] = {}

    @property
    def num_open(self) -> int:
        """Transfers that are expected, receiving, adopted or draining: those not yet fenced to the end."""
        return len(self._open)

    def expect(self, transfer_id: int, tokens: TokenRange) -> None:
        """Take frames of ``tokens`` from now on. Raises ValueError for an id that is or was in use and for an empty range."""
        if not 0 < transfer_id < 1 << 64:
            raise ValueError(f"transfer_id: given {transfer_id}, must be in [1, 2^64)")
        if transfer_id in self._open or transfer_id in self._ended:
            raise ValueError(f"transfer_id: {transfer_id} is in use or was")
        receiver = Receiver(self._spec, transfer_id, tokens)
        receiver.expect()
        self._open[transfer_id] = receiver

    def wants(self, header: FrameHeader) -> bool:
        """Whether the payload is worth an allocation; if not, ``accept`` needs none of it."""
        receiver = self._find(header.transfer_id, header.epoch)
        return isinstance(receiver, Receiver) and receiver.wants(header)

    async def accept(self, header: FrameHeader, block: KVBlock | None) -> Reply:
        """As ``receive``, for those who wait. Cancelling the call does not stop the write that it started."""
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def answer(reply: Reply) -> None:
            if not answered.done():
                answered.set_result(reply)

        self.receive(header, block, answer)
        return await answered

    def receive(self, header: FrameHeader, block: KVBlock | None, answer: Callable[[Reply], None]) -> None:
        """Place a checked frame, or find out why not; ``answer`` is called once, now or when it is placed. ``block`` None: the payload was
        thrown away because nobody ``wants`` it.
        """
        receiver = self._find(header.transfer_id, header.epoch)
        if isinstance(receiver, NackReason):
            return answer(self._drop(header, receiver))
        try:
            admission = receiver.inspect(header) if block is None else receiver.begin(header)
        except FrameError as error:
            return answer(self._refuse(receiver, header, error))
        if admission is Admission.DEAD or (block is None and admission is Admission.PLACE):
            return answer(self._drop(header, NackReason.FENCED if admission is Admission.DEAD else NackReason.UNKNOWN))
        writer_key = (header.transfer_id, header.cells)
        if admission is Admission.PLACE and block is not None:
            writer = asyncio.get_running_loop().create_task(_as_coroutine(self._place(header.transfer_id, block)))
            self._writers[writer_key] = writer
            writer.add_done_callback(partial(self._written, receiver, header))
        if (current := self._writers.get(writer_key)) is not None:
            current.add_done_callback(lambda writer: answer(self._reply(receiver, header, writer)))
        else:
            answer(self._reply(receiver, header, None))

    def placed(self, transfer_id: int, epoch: int) -> list[Rectangle] | NackReason:
        """What a sender need not send again after a break, or why it need send nothing at all."""
        receiver = self._find(transfer_id, epoch)
        if isinstance(receiver, NackReason):
            return receiver
        rectangles = receiver.placed_rectangles()
        return NackReason.FENCED if rectangles is None else rectangles

    def stopped(self, transfer_id: int, epoch: int, why: str) -> None:
        """The sender sends no more of a transfer: it fails unless it is complete. Of a transfer that is over or unknown this is no news."""
        receiver = self._find(transfer_id, epoch)
        if isinstance(receiver, Receiver) and receiver.state is ReceiverState.RECEIVING:
            log.warning("transfer %d: stopped by its sender: %s", transfer_id, why)
            self._fail(receiver, TransferFailed("UNAVAILABLE", f"the sender stopped: {why}"))

    async def fence(self, transfer_id: int) -> None:
        """Returns when no writer can touch the transfer's pages any more. Later frames are dropped. Idempotent; unknown ids are fine."""
        receiver = self._open.get(transfer_id)
        if receiver is None:
            return
        released = self._released.setdefault(transfer_id, asyncio.Event())
        receiver.fence()
        self._settle(receiver)
        await released.wait()

    async def close(self) -> None:
        """Fence everything."""
        await asyncio.gather(*(self.fence(transfer_id) for transfer_id in list(self._open)))

    def _find(self, transfer_id: int, epoch: int) -> Receiver | NackReason:
        if epoch != self._epoch:
            return NackReason.EPOCH
        receiver = self._open.get(transfer_id) or self._ended.get(transfer_id)
        return NackReason.UNKNOWN if receiver is None else receiver

    def _reply(self, receiver: Receiver, header: FrameHeader, writer: asyncio.Task[None] | None) -> Reply:
        """To a frame that is there or not, now that its writer has ended. The state may have moved on meanwhile."""
        reason: NackReason | None = None
        if writer is not None and (writer.cancelled() or writer.exception() is not None):
            reason = NackReason.FAILED
        elif not receiver.has(header):
            reason = NackReason.FENCED
        return Reply(header.transfer_id, header.epoch, header.sequence, reason)

    def _drop(self, header: FrameHeader, reason: NackReason) -> Reply:
        self.late_frames_dropped += 1
        log.info("transfer %d: late frame %d dropped: %s", header.transfer_id, header.sequence, reason.name)
        return Reply(header.transfer_id, header.epoch, header.sequence, reason)

    def _refuse(self, receiver: Receiver, header: FrameHeader, error: FrameError) -> Reply:
        self.frames_refused += 1
        log.warning("transfer %d: frame %d refused: %s", header.transfer_id, header.sequence, error)
        if receiver.state is ReceiverState.RECEIVING:
            self._fail(receiver, TransferFailed("INTERNAL", f"a frame was refused: {error}"))
        return Reply(header.transfer_id, header.epoch, header.sequence, NackReason.REFUSED)

    def _written(self, receiver: Receiver, header: FrameHeader, writer: asyncio.Task[None]) -> None:
        """A ``place`` ended."""
        del self._writers[(header.transfer_id, header.cells)]
        error = asyncio.CancelledError("place was cancelled") if writer.cancelled() else writer.exception()
        if error is not None:
            log.error("transfer %d: placing frame %d failed", header.transfer_id, header.sequence, exc_info=error)
            was_receiving = receiver.state is ReceiverState.RECEIVING
            receiver.place_failed(header)
            if was_receiving:
                self._failed(header.transfer_id, TransferFailed("INTERNAL", f"placing a frame failed: {error!r}"))
        else:
            self.bytes_received += stored_bytes(self._spec, header)
            self.wire_bytes_received += header.payload_bytes
            receiver.placed(header)
            if receiver.state is ReceiverState.COMPLETE:
                receiver.adopt()
                self._complete(header.transfer_id, receiver.report)
        if header.transfer_id in self._released:
            self._settle(receiver)

    def _fail(self, receiver: Receiver, failure: TransferFailed) -> None:
        receiver.fence()
        self._failed(receiver.transfer_id, failure)

    def _settle(self, receiver: Receiver) -> None:
        """Someone fences: release once nobody writes."""
        if receiver.state not in (ReceiverState.DRAINED, ReceiverState.ADOPTED):
            return
        receiver.release()
        del self._open[receiver.transfer_id]
        self._ended[receiver.transfer_id] = receiver
        while len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._released.pop(receiver.transfer_id).set()


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable
