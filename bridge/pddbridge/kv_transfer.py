"""The life of one transfer at its receiver: who may write which page, what is there. No I/O, no clock. Its sender: ``kv_sender``.

reserved -> receiving -> complete -> adopted -> released
   \\___________\\___________\\-> fenced -> drained -> released

A receiver's pages may go back to the pool only from ``released``; ``released`` is reached only when no writer is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from pddbridge.codecs import CodecId
from pddbridge.kv_coverage import Cells, Coverage, Rectangle, rectangle_of
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.kv_wire import FrameHeader

# gRPC status names, those that cross processes as they are.
FailureCode = Literal["CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE"]


class TransferFailed(Exception):  # noqa: N818 (the name that every caller agreed on)
    """The transfer will never complete. ``code`` is a gRPC status name."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code: FailureCode = code
        self.message = message


class FrameError(Exception):
    """A well-formed frame that does not fit its transfer: outside what is expected, partly there already, or there with other bytes."""


@dataclass(frozen=True)
class TransferReport:
    """``bytes``: of KV as it is stored, however it was coded; placed and checked (receiver) or acknowledged as such (sender), each once.
    ``num_repeated``: duplicates that were acknowledged again (receiver) or frames sent again (sender). ``wire_bytes``: of the payloads that
    carried this KV, each once; what an earlier sender had sent is not in a sender's.
    """

    tokens: TokenRange
    bytes: int
    num_frames: int
    num_repeated: int
    wire_bytes: int


def stored_bytes(spec: KVSpec, header: FrameHeader) -> int:
    """Of the KV that a checked frame carries, however it is coded."""
    if header.codec is CodecId.RAW:
        return header.payload_bytes
    plane = spec.groups[header.group].planes[header.plane]
    num_vectors = len(header.layers) * len(header.tokens) * len(header.heads)
    return num_vectors * plane.head_dim * spec.np_dtype_of(plane).itemsize


class ReceiverState(Enum):
    """See the module docstring."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    ADOPTED = "adopted"
    FENCED = "fenced"
    DRAINED = "drained"
    RELEASED = "released"


_TAKES_FRAMES: Final = (ReceiverState.RECEIVING, ReceiverState.COMPLETE, ReceiverState.ADOPTED)


class Admission(Enum):
    """What to do with a frame. PLACE: write it, then say ``placed``. WAIT: the same frame is being written, acknowledge when it is.
    AGAIN: it is there, acknowledge again and write nothing. DEAD: drop it, the transfer takes no frames.
    """

    PLACE = "place"
    WAIT = "wait"
    AGAIN = "again"
    DEAD = "dead"


class Receiver:
    """One incoming transfer of ``tokens`` (all planes, layers and heads of ``spec``), from however many senders.

    Frames may come in any order, repeatedly, over any connection. Raises ValueError for an empty range: there is nothing to transfer.
    """

    def __init__(self, spec: KVSpec, transfer_id: int, tokens: TokenRange) -> None:
        if not len(tokens):
            raise ValueError(f"Receiver.tokens: given the empty {tokens}, a transfer has at least one token")
        self.transfer_id = transfer_id
        self.tokens = tokens
        self.state = ReceiverState.RESERVED
        self._spec = spec
        self._coverage: Coverage | None = Coverage(spec, tokens)
        # Their payloads' checksums.
        self._writing: dict[Cells, int] = {}
        self._placed: dict[Cells, int] = {}
        self._was_complete = False
        self._bytes = 0
        self._wire_bytes = 0
        self._num_repeated = 0

    @property
    def num_writers(self) -> int:
        """Frames that are being written into the transfer's pages right now."""
        return len(self._writing)

    @property
    def report(self) -> TransferReport:
        """So far; final once complete."""
        return TransferReport(self.tokens, self._bytes, len(self._placed), self._num_repeated, self._wire_bytes)

    def expect(self) -> None:
        """reserved -> receiving: from now on frames are admitted."""
        self._require(ReceiverState.RESERVED)
        self.state = ReceiverState.RECEIVING

    def inspect(self, header: FrameHeader) -> Admission:
        """What ``begin`` would say now, without any effect. Raises FrameError."""
        cells, rectangle = header.cells, header.rectangle
        if self.state not in _TAKES_FRAMES and not (self._was_complete and cells in self._placed):
            return Admission.DEAD
        known_crc = self._placed.get(cells, self._writing.get(cells))
        if known_crc is not None:
            if known_crc != header.payload_crc:
                raise FrameError(f"{rectangle} came before with other bytes")
            return Admission.WAIT if cells in self._writing else Admission.AGAIN
        if self._coverage is None:
            raise FrameError(f"{rectangle} overlaps the complete {self.tokens}")
        group, plane, layers, tokens, heads = rectangle
        if not self._coverage.contains(group, plane, tokens, heads):
            raise FrameError(f"{rectangle} is not within the expected {self.tokens}")
        if self._coverage.any_taken(group, plane, layers, tokens, heads):
            raise FrameError(f"{rectangle} overlaps what came before")
        return Admission.PLACE

    def wants(self, header: FrameHeader) -> bool:
        """Whether ``begin`` would say PLACE, unless some cell of the frame came in another one: only ``begin`` looks at every cell."""
        if self.state not in _TAKES_FRAMES or self._coverage is None or header.cells in self._placed or header.cells in self._writing:
            return False
        return self._coverage.contains(header.group, header.plane, header.tokens, header.heads)

    def has(self, header: FrameHeader) -> bool:
        """Whether the frame is there, in pages that are the transfer's."""
        alive = self.state in _TAKES_FRAMES or self._was_complete
        return alive and self._placed.get(header.cells) == header.payload_crc

    def placed_rectangles(self) -> list[Rectangle] | None:
        """What was placed, as few disjoint rectangles: what a sender need not send again. None if the transfer takes no frames."""
        if self.state not in _TAKES_FRAMES and not self._was_complete:
            return None
        there = Coverage(self._spec, self.tokens)
        for cells in self._placed:
            there.mark(*rectangle_of(cells))
        return list(there.taken())

    def begin(self, header: FrameHeader) -> Admission:
        """As ``inspect``; if PLACE, the caller is a writer until it says ``placed`` or ``place_failed``. Raises FrameError."""
        admission = self.inspect(header)
        if admission is Admission.PLACE:
            assert self._coverage is not None
            taken = self._coverage.take(*header.rectangle)
            assert taken, "inspect looked at every cell"
            self._writing[header.cells] = header.payload_crc
        elif admission in (Admission.AGAIN, Admission.WAIT):
            self._num_repeated += 1
        return admission

    def placed(self, header: FrameHeader) -> None:
        """A writer finished. The last one makes a receiving transfer complete, a fenced one drained."""
        crc = self._writing.pop(header.cells)
        self._placed[header.cells] = crc
        self._bytes += stored_bytes(self._spec, header)
        self._wire_bytes += header.payload_bytes
        if self.state is ReceiverState.RECEIVING:
            assert self._coverage is not None
            if self._coverage.num_free == 0 and not self._writing:
                self.state = ReceiverState.COMPLETE
                self._was_complete = True
                self._coverage = None
        self._drain()

    def place_failed(self, header: FrameHeader) -> None:
        """A writer gave up, its pages are in an unknown state: the transfer is fenced."""
        del self._writing[header.cells]
        self.fence()

    def adopt(self) -> None:
        """complete -> adopted: the pages are the request's."""
        self._require(ReceiverState.COMPLETE)
        self.state = ReceiverState.ADOPTED

    def fence(self) -> None:
        """No frame is admitted any more. Drained at once if nobody writes, else when the last writer ends. Nothing to do once adopted."""
        if self.state in (ReceiverState.RESERVED, ReceiverState.RECEIVING, ReceiverState.COMPLETE):
            self.state = ReceiverState.FENCED
            self._coverage = None
            self._was_complete = False
        self._drain()

    def release(self) -> None:
        """adopted or drained -> released: the pages may have another owner. Raises ValueError in any other state."""
        self._require(ReceiverState.ADOPTED, ReceiverState.DRAINED)
        self.state = ReceiverState.RELEASED

    def _drain(self) -> None:
        if self.state is ReceiverState.FENCED and not self._writing:
            self.state = ReceiverState.DRAINED

    def _require(self, *allowed: ReceiverState) -> None:
        if self.state not in allowed:
            names = [state.value for state in allowed]
            raise ValueError(f"transfer {self.transfer_id}: state must be one of {names}, is {self.state.value}")
