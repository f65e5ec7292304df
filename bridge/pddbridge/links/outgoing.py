"""One outgoing transfer as its owner sees it, whatever link carries it: push, await, cancel, and the deadline for progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pddbridge.codecs import CodecId
from pddbridge.engine import KVBlock
from pddbridge.kv_coverage import Rectangle
from pddbridge.kv_notes import StopReason
from pddbridge.kv_sender import DueFrame, OutgoingFrame, Sender, SenderState
from pddbridge.kv_transfer import TransferFailed, TransferReport
from pddbridge.kv_wire import NackReason
from pddbridge.link_schedule import Priority
from pddbridge.links.slot_loans import Lend


class OutgoingTransfer:
    """Lives on one event loop. ``offer`` tells the link that frames wait. ``stall_timeout_s``: longest wait for an acknowledgement while
    frames are owed, by the loop's monotonic clock; a transfer with nothing to send may be idle for ever. ``on_acked`` is called with the
    bytes of KV, as stored, of every acknowledged frame. ``on_stopped`` tells the link once if the transfer ends before it is done for a
    reason that the receiver cannot know. ``lend``: memory of the link in which blocks may be made, so that it does not copy them.
    ``priority`` and ``deadline_s``, by the loop's clock: for the link's choice who sends next.
    """

    def __init__(
        self,
        machine: Sender,
        offer: Callable[[OutgoingTransfer], None],
        stall_timeout_s: float,
        on_acked: Callable[[int], None] | None = None,
        on_stopped: Callable[[OutgoingTransfer, StopReason], None] | None = None,
        priority: Priority = Priority.NORMAL,
        lend: Lend | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.priority = priority
        self.deadline_s = deadline_s
        self.lend = lend
        self._machine = machine
        self._offer = offer
        self._stall_timeout_s = stall_timeout_s
        self._on_acked = on_acked
        self._on_stopped = on_stopped
        self._loop = asyncio.get_running_loop()
        self._progress_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    @property
    def transfer_id(self) -> int:
        return self._machine.transfer_id

    @property
    def ended(self) -> bool:
        """Whether ``done`` would return or raise at once."""
        return self._ended.is_set()

    @property
    def report(self) -> TransferReport:
        """So far; final once done."""
        return self._machine.report

    def push(self, block: KVBlock) -> None:
        """Queue a block; its values must not change until the transfer ends. Does not wait.

        Raises ValueError for a malformed block, one outside the transfer or one that overlaps an earlier one.
        Ignored once cancelled or failed.
        """
        was_idle = self._machine.num_owed == 0
        self._delivered(self._machine.push(block))
        if self._machine.num_owed:
            if was_idle:
                self._progress_at = self._loop.time()
                self._watch(self._stall_timeout_s)
            self._offer(self)

    async def done(self) -> TransferReport:
        """Returns when every cell was pushed and every frame acknowledged after placing. Raises TransferFailed."""
        await self._ended.wait()
        if (failure := self._machine.failure) is not None:
            raise TransferFailed(failure.code, failure.message)
        return self._machine.report

    def cancel(self) -> None:
        """Send nothing more and tell the receiver so; ``done`` raises TransferFailed CANCELLED. No effect once ended."""
        self._machine.cancel()
        self._settle(StopReason.CANCELLED)

    # What follows is for the link.

    @property
    def num_queued(self) -> int:
        return self._machine.num_queued

    @property
    def owed_bytes(self) -> int:
        """Bytes of KV that were pushed and are not acknowledged."""
        return self._machine.owed_bytes

    @property
    def remaining_bytes(self) -> int:
        """Bytes of KV, of the whole transfer, that have yet to leave."""
        return self._machine.remaining_bytes

    @property
    def codec(self) -> CodecId:
        return self._machine.codec

    def next_question(self) -> int | None:
        """As the sender's: to be asked before its frames, over any connection."""
        return self._machine.next_question()

    def send_raw(self) -> None:
        """From now on: the receiver does not take the codec."""
        self._machine.codec = CodecId.RAW

    def next_frame(self) -> OutgoingFrame | None:
        return self._machine.next_frame()

    def next_due(self) -> DueFrame | None:
        return self._machine.next_due()

    def encoded(self, sequence: int, wire_bytes: int) -> None:
        self._machine.encoded(sequence, wire_bytes)

    def acked(self, sequence: int) -> int:
        return self._delivered(self._machine.acked(sequence))

    def answered(self, sequence: int, placed: Iterable[Rectangle]) -> int:
        """The receiver answered question ``sequence``. Returns the bytes of KV found to be there."""
        num_bytes = self._delivered(self._machine.answered(sequence, placed))
        self._offer(self)
        return num_bytes

    def question_lost(self, sequence: int) -> None:
        self._machine.question_lost(sequence)
        self._offer(self)

    def nacked(self, reason: NackReason) -> None:
        self._machine.nacked(reason)
        self._settle()

    def lost(self, sequence: int, why: str) -> None:
        """The frame is to be sent again."""
        self._machine.lost(sequence, why)
        self._settle(StopReason.FAILED)
        if self._machine.num_queued:
            self._offer(self)

    def doubt(self, sequence: int, why: str) -> None:
        """The receiver is to be asked whether it has the frame."""
        self._machine.doubt(sequence, why)
        self._settle(StopReason.FAILED)
        self._offer(self)

    def fail(self, failure: TransferFailed) -> None:
        self._machine.fail(failure)
        self._settle()

    def _delivered(self, num_bytes: int) -> int:
        if num_bytes:
            self._progress_at = self._loop.time()
            self._settle()
            if self._on_acked is not None:
                self._on_acked(num_bytes)
        return num_bytes

    def _settle(self, why: StopReason | None = None) -> None:
        """``why``: to be told to the receiver if this is the end and not a good one."""
        if self._machine.state is not SenderState.OPEN and not self.ended:
            self._ended.set()
            if why is not None and self._on_stopped is not None:
                self._on_stopped(self, why)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _watch(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._check_progress)

    def _check_progress(self) -> None:
        self._timer = None
        if self._machine.num_owed == 0:
            return
        waited_s = self._loop.time() - self._progress_at
        if waited_s >= self._stall_timeout_s:
            owed = self._machine.num_owed
            self._machine.fail(TransferFailed("DEADLINE_EXCEEDED", f"no frame of {owed} owed was acknowledged for {waited_s:.1f} s"))
            self._settle(StopReason.FAILED)
        else:
            self._watch(self._stall_timeout_s - waited_s)
