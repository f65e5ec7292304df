"""The life of one transfer at its sender: open -> done | failed | cancelled. What is owed, in flight, in doubt. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np
from crc32c import crc32c

from pddbridge.codecs import CodecId
from pddbridge.engine import KVBlock
from pddbridge.kv_block import check_block, split_block
from pddbridge.kv_coverage import Coverage, Rectangle
from pddbridge.kv_spec import HeadRange, KVSpec, TokenRange
from pddbridge.kv_transfer import FailureCode, TransferFailed, TransferReport
from pddbridge.kv_wire import MAX_PAYLOAD_BYTES, FrameHeader, NackReason, coded_frame_of, frame_of, payload_view

_NACK_CODES: Final[dict[NackReason, tuple[FailureCode, str]]] = {
    NackReason.UNKNOWN: ("NOT_FOUND", "the receiver does not know the transfer"),
    NackReason.FENCED: ("CANCELLED", "the receiver has fenced the transfer"),
    NackReason.EPOCH: ("UNAVAILABLE", "the receiver has restarted"),
    NackReason.REFUSED: ("INTERNAL", "the receiver refused a frame's ranges"),
    NackReason.FAILED: ("INTERNAL", "the receiver could not place a frame"),
}


class SenderState(Enum):
    """Every state but ``OPEN`` is final."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class OutgoingFrame:
    """A frame to send: its header and the block that it carries. ``coded``: its payload if that is not the block's values.
    ``attempt``: from 1.
    """

    header: FrameHeader
    block: KVBlock
    coded: bytes | memoryview | None = None
    attempt: int = 1

    @property
    def payload(self) -> memoryview:
        return payload_view(self.block.values) if self.coded is None else memoryview(self.coded)


@dataclass(frozen=True)
class Framing:
    """What all frames of a transfer have in common. ``checksum``: of payloads that are not coded."""

    spec: KVSpec
    transfer_id: int
    epoch: int
    checksum: Callable[[memoryview], int]
    max_frame_bytes: int


@dataclass(frozen=True)
class DueFrame:
    """A block whose turn it is, before it is bytes. ``wire_bytes``: of its payload, once known; coding makes it smaller."""

    framing: Framing
    sequence: int
    block: KVBlock
    codec: CodecId
    attempt: int = 1
    wire_bytes: int | None = None

    def encode(self) -> OutgoingFrame:
        """Pure, in any thread. Unless the codec is raw it takes milliseconds."""
        framing = self.framing
        where = (framing.spec, framing.transfer_id, framing.epoch, self.sequence, self.block)
        if self.codec is CodecId.RAW:
            return OutgoingFrame(frame_of(*where, framing.checksum, framing.max_frame_bytes), self.block, attempt=self.attempt)
        header, payload = coded_frame_of(*where, self.codec, framing.max_frame_bytes)
        return OutgoingFrame(header, self.block, payload, self.attempt)

    @property
    def rectangle(self) -> Rectangle:
        group, plane = check_block(self.framing.spec, self.block)
        return (self.framing.spec.groups.index(group), plane, self.block.layers, self.block.tokens, self.block.heads)


def _range_bytes(spec: KVSpec, tokens: TokenRange, heads: HeadRange | None) -> int:
    """KV of ``tokens`` as stored, of all heads or of the shard ``heads``."""
    if heads is None:
        return len(tokens) * spec.bytes_per_token
    planes = [(group.num_layers, plane) for group in spec.groups for plane in group.planes]
    return len(tokens) * len(heads) * sum(layers * plane.head_dim * spec.np_dtype_of(plane).itemsize for layers, plane in planes)


class Sender:
    """One outgoing transfer of ``tokens``, for all heads or, from a head shard, for ``heads`` (absolute).

    Done when every cell was pushed and every frame was acknowledged, or found to be there. A frame may be tried ``max_attempts`` times.
    ``checksum``: of payloads, the link's. ``resume``: an earlier sender may have sent a part; nothing is sent before the receiver has said
    what it has. ``codec``: of payloads, where it makes them smaller; of frames that are due from then on if it is set later.
    ``max_frame_bytes``: the link's.
    """

    def __init__(
        self,
        spec: KVSpec,
        transfer_id: int,
        epoch: int,
        tokens: TokenRange,
        heads: HeadRange | None = None,
        max_attempts: int = 5,
        checksum: Callable[[memoryview], int] = crc32c,
        resume: bool = False,
        codec: CodecId = CodecId.RAW,
        max_frame_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        if not len(tokens):
            raise ValueError(f"Sender.tokens: given the empty {tokens}, a transfer has at least one token")
        if not (0 < transfer_id < 1 << 64 and 0 <= epoch < 1 << 64):
            raise ValueError(f"Sender: transfer_id must be in [1, 2^64), epoch in [0, 2^64), given {transfer_id} and {epoch}")
        self.transfer_id = transfer_id
        self.tokens = tokens
        self.state = SenderState.OPEN
        self.failure: TransferFailed | None = None
        self._spec = spec
        self._framing = Framing(spec, transfer_id, epoch, checksum, max_frame_bytes)
        self._max_attempts = max_attempts
        self.codec = codec
        self._heads = heads
        self._coverage = Coverage(spec, tokens, heads)
        # Of a resumed transfer: whether the receiver has said what it had before, and that.
        self._awaits_what_is_there = resume
        self._there: Coverage | None = None
        self._question: int | None = None
        self._doubtful: dict[int, DueFrame] = {}
        self._queue: deque[tuple[int, KVBlock]] = deque()
        self._in_flight: dict[int, DueFrame] = {}
        self._resend: deque[DueFrame] = deque()
        self._next_sequence = 0
        self._owed_bytes = 0
        self._total_bytes = _range_bytes(spec, tokens, heads)
        self._bytes = 0
        self._wire_bytes = 0
        self._num_acked = 0
        self._num_repeated = 0

    @property
    def report(self) -> TransferReport:
        """So far; final once done."""
        return TransferReport(self.tokens, self._bytes, self._num_acked, self._num_repeated, self._wire_bytes)

    @property
    def num_queued(self) -> int:
        """Frames that wait to be sent."""
        return len(self._queue) + len(self._resend)

    @property
    def num_owed(self) -> int:
        """Frames that are not acknowledged: queued, in flight or in doubt."""
        return self.num_queued + len(self._in_flight) + len(self._doubtful)

    @property
    def owed_bytes(self) -> int:
        """Bytes of KV in the frames that are owed."""
        return self._owed_bytes

    @property
    def remaining_bytes(self) -> int:
        """Bytes of KV of the whole transfer that have yet to leave, pushed or not."""
        return self._total_bytes - self._bytes - sum(due.block.values.nbytes for due in self._in_flight.values())

    def push(self, block: KVBlock) -> int:
        """Queue a block, cut into frames. Its values must not change until the transfer ends; they are sent from where they are.

        Returns the bytes of KV that the receiver of a resumed transfer has already. Raises ValueError for a malformed block, one outside
        the transfer or one that overlaps an earlier one.
        Ignored once cancelled or failed.
        """
        if self.state in (SenderState.CANCELLED, SenderState.FAILED):
            return 0
        group, plane = check_block(self._spec, block)
        where = (self._spec.groups.index(group), plane)
        if not self._coverage.contains(*where, block.tokens, block.heads):
            raise ValueError(f"push: {block.tokens} {block.heads} of {block.plane!r} is outside the transfer of {self.tokens}")
        parts = list(split_block(block, self._framing.max_frame_bytes))
        if not self._coverage.take(*where, block.layers, block.tokens, block.heads):
            raise ValueError(f"push: {block.layers} {block.tokens} {block.heads} of {block.plane!r} was pushed before")
        self._owed_bytes += block.values.nbytes
        return sum(self._sift(part) for part in parts)

    def next_due(self) -> DueFrame | None:
        """Take the next frame to send; it is in flight until ``acked``, ``lost`` or ``doubt``. None if nothing may be sent now."""
        if self._awaits_what_is_there:
            return None
        if self._resend:
            due = self._resend.popleft()
            self._num_repeated += 1
        elif self._queue:
            due = DueFrame(self._framing, *self._queue.popleft(), self.codec)
        else:
            return None
        self._in_flight[due.sequence] = due
        return due

    def next_frame(self) -> OutgoingFrame | None:
        """As ``next_due``, encoded at once."""
        due = self.next_due()
        if due is None:
            return None
        frame = due.encode()
        self.encoded(due.sequence, frame.header.payload_bytes)
        return frame

    def encoded(self, sequence: int, wire_bytes: int) -> None:
        """Frame ``sequence``, in flight, goes out with a payload of ``wire_bytes``."""
        due = self._in_flight.get(sequence)
        if due is not None and wire_bytes != (due.block.values.nbytes if due.wire_bytes is None else due.wire_bytes):
            self._in_flight[sequence] = replace(due, wire_bytes=wire_bytes)

    def acked(self, sequence: int) -> int:
        """The receiver placed and checked frame ``sequence``. Its bytes of KV, 0 for no news (a late or repeated acknowledgement)."""
        due = self._in_flight.pop(sequence, None)
        if due is None or self.state is not SenderState.OPEN:
            return 0
        return self._delivered(due)

    def lost(self, sequence: int, why: str) -> None:
        """The connection that carried ``sequence`` broke before its acknowledgement: send it again, or fail after too many attempts."""
        if (frame := self._take_back(sequence, why)) is not None:
            self._resend.append(frame)

    def doubt(self, sequence: int, why: str) -> None:
        """As ``lost``, but whether the frame is sent again is decided by what the receiver says it has: see ``next_question``."""
        if (frame := self._take_back(sequence, why)) is not None:
            self._doubtful[sequence] = frame

    def next_question(self) -> int | None:
        """The sequence under which to ask the receiver what it has; None if nothing is in doubt or an answer is awaited already."""
        if self.state is not SenderState.OPEN or self._question is not None or not (self._doubtful or self._awaits_what_is_there):
            return None
        self._question = self._new_sequence()
        return self._question

    def question_lost(self, sequence: int) -> None:
        """The connection that carried the question broke: ask again."""
        if self._question == sequence:
            self._question = None

    def answered(self, sequence: int, placed: Iterable[Rectangle]) -> int:
        """The receiver has ``placed``. Returns the bytes of KV in owed frames that this settles; the rest of them is queued again."""
        if self._question != sequence or self.state is not SenderState.OPEN:
            return 0
        self._question = None
        there = Coverage(self._spec, self.tokens, self._heads)
        for rectangle in placed:
            there.mark(*rectangle)
        num_bytes = 0
        if self._awaits_what_is_there:
            self._awaits_what_is_there, self._there = False, there
            waiting, self._queue = self._queue, deque()
            num_bytes += sum(self._sift(block) for _, block in waiting)
        doubtful, self._doubtful = self._doubtful, {}
        for frame in doubtful.values():
            # A frame is placed whole or not at all, so one free cell says that all are.
            if any(True for _ in there.free_within(*frame.rectangle)):
                self._resend.append(frame)
            else:
                num_bytes += self._delivered(frame)
        return num_bytes

    def nacked(self, reason: NackReason) -> None:
        """The receiver takes no frame of this transfer."""
        code, message = _NACK_CODES[reason]
        self.fail(TransferFailed(code, message))

    def fail(self, failure: TransferFailed) -> None:
        """open -> failed. The first failure stands."""
        if self.state is SenderState.OPEN:
            self.state = SenderState.FAILED
            self.failure = failure
            self._drop()

    def cancel(self) -> None:
        """open -> cancelled: nothing more is sent."""
        if self.state is SenderState.OPEN:
            self.state = SenderState.CANCELLED
            self.failure = TransferFailed("CANCELLED", "the sender cancelled the transfer")
            self._drop()

    def _drop(self) -> None:
        self._queue.clear()
        self._resend.clear()
        self._in_flight.clear()
        self._doubtful.clear()
        self._owed_bytes = 0

    def _sift(self, block: KVBlock) -> int:
        """Queue of ``block`` what the receiver lacks, as far as that is known. Returns the bytes of KV that it has."""
        if self._there is None:
            self._queue.append((self._new_sequence(), block))
            return 0
        group, plane = check_block(self._spec, block)
        group_index = self._spec.groups.index(group)
        lacking = list(self._there.free_within(group_index, plane, block.layers, block.tokens, block.heads))
        there_bytes = block.values.nbytes
        for _, _, layers, tokens, heads in lacking:
            part = block.values[
                layers.start - block.layers.start : layers.stop - block.layers.start,
                tokens.start - block.tokens.start : tokens.stop - block.tokens.start,
                heads.start - block.heads.start : heads.stop - block.heads.start,
            ]
            self._queue.append((self._new_sequence(), KVBlock(block.plane, layers, tokens, heads, np.ascontiguousarray(part))))
            there_bytes -= part.nbytes
        self._owed_bytes -= there_bytes
        self._bytes += there_bytes
        self._end_if_done()
        return there_bytes

    def _delivered(self, frame: DueFrame) -> int:
        num_bytes = frame.block.values.nbytes
        self._owed_bytes -= num_bytes
        self._bytes += num_bytes
        self._wire_bytes += num_bytes if frame.wire_bytes is None else frame.wire_bytes
        self._num_acked += 1
        self._end_if_done()
        return num_bytes

    def _end_if_done(self) -> None:
        if self._coverage.num_free == 0 and self._owed_bytes == 0:
            self.state = SenderState.DONE

    def _take_back(self, sequence: int, why: str) -> DueFrame | None:
        """A frame in flight whose connection broke, as it may be tried again."""
        frame = self._in_flight.pop(sequence, None)
        if frame is None or self.state is not SenderState.OPEN:
            return None
        if frame.attempt >= self._max_attempts:
            self.fail(TransferFailed("UNAVAILABLE", f"frame {sequence} was sent {self._max_attempts} times, last: {why}"))
            return None
        return replace(frame, attempt=frame.attempt + 1)

    def _new_sequence(self) -> int:
        self._next_sequence += 1
        return self._next_sequence - 1
