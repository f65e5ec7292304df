"""Transfers through a hostile network onto a small page pool: in whatever order, no page is written by a transfer that does not own it,
and what is adopted is exact. The state machines run as the links run them; the network here loses, repeats and reorders, senders die and
others go on, receivers restart under a new epoch, deadlines expire, and new requests take the pages of old ones as soon as they may.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, read_blocks, write_block
from pddbridge.kv_coverage import Rectangle
from pddbridge.kv_layout import head_major
from pddbridge.kv_sender import OutgoingFrame, Sender, SenderState
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.kv_transfer import Admission, FrameError, Receiver, ReceiverState, TransferFailed
from pddbridge.kv_wire import NackReason
from tests.support.kv import bits, blocks_of, random_planes

SPEC = KVSpec.gqa(2, 2, 2, "float32")
PAGE_SIZE, NUM_PAGES = 4, 6
TOKENS = TokenRange(1, 7)
PAGES_EACH = 2
TOTAL_BYTES = len(TOKENS) * SPEC.bytes_per_token


@dataclass
class Transfer:
    """Both ends of one transfer and what travels between them. ``epoch``: of the receiver's life that it belongs to."""

    sender: Sender
    receiver: Receiver
    planes: dict[str, np.ndarray]
    table: np.ndarray
    epoch: int
    on_the_way: list[OutgoingFrame] = field(default_factory=list)
    seen: list[OutgoingFrame] = field(default_factory=list)
    acks: list[int] = field(default_factory=list)
    answers: list[tuple[int, list[Rectangle] | None]] = field(default_factory=list)
    writing: list[OutgoingFrame] = field(default_factory=list)

    @property
    def may_return_pages(self) -> bool:
        return self.receiver.state in (ReceiverState.DRAINED, ReceiverState.ADOPTED)


class HostileNetwork(RuleBasedStateMachine):
    transfers = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 1
        self.pool = KVPool.zeros(head_major(PAGE_SIZE, "float32"), SPEC, NUM_PAGES)
        self.free = list(range(NUM_PAGES))
        self.owner: dict[int, int] = {}
        self.all: list[Transfer] = []
        self.past: list[Transfer] = []  # of earlier lives of the receiver

    def owns(self, transfer: Transfer) -> bool:
        return all(self.owner.get(int(page)) == transfer.receiver.transfer_id for page in transfer.table)

    def give_back(self, t: Transfer) -> None:
        t.receiver.release()
        for page in t.table.tolist():
            del self.owner[page]
            self.free.append(page)

    def push_all(self, sender: Sender, planes: dict[str, np.ndarray], chunk: int) -> None:
        for first in range(TOKENS.start, TOKENS.stop, chunk):
            for block in blocks_of(SPEC, planes, TokenRange(first, min(first + chunk, TOKENS.stop))):
                sender.push(block)

    def begin(self, pages: list[int], max_attempts: int, chunk: int) -> Transfer:
        transfer_id = len(self.all) + len(self.past) + 1
        self.owner.update(dict.fromkeys(pages, transfer_id))
        receiver = Receiver(SPEC, transfer_id, TOKENS)
        receiver.expect()
        sender = Sender(SPEC, transfer_id, self.epoch, TOKENS, max_attempts=max_attempts)
        planes = random_planes(SPEC, TOKENS.stop, seed=transfer_id)
        self.push_all(sender, planes, chunk)
        transfer = Transfer(sender, receiver, planes, np.array(pages), self.epoch)
        self.all.append(transfer)
        return transfer

    @initialize(target=transfers, chunk=st.integers(1, 6))
    def start_the_first(self, chunk: int) -> Transfer:
        return self.start(4, chunk)

    @precondition(lambda self: len(self.free) >= PAGES_EACH)
    @rule(target=transfers, max_attempts=st.integers(1, 4), chunk=st.integers(1, 6))
    def start(self, max_attempts: int, chunk: int) -> Transfer:
        pages, self.free = self.free[:PAGES_EACH], self.free[PAGES_EACH:]
        return self.begin(pages, max_attempts, chunk)

    @precondition(lambda self: len(self.free) < PAGES_EACH)
    @rule(target=transfers, chunk=st.integers(1, 6), data=st.data())
    def start_under_page_pressure(self, chunk: int, data: st.DataObject) -> object:
        """No page is free: some request must go. Its pages have a new owner in the same moment, if no writer is left; not before."""
        victims = [t for t in self.all if t.receiver.state is not ReceiverState.RELEASED]
        victim = victims[data.draw(st.integers(0, len(victims) - 1))]
        victim.receiver.fence()
        if not victim.may_return_pages:
            assert victim.writing
            return multiple()
        self.give_back(victim)
        pages, self.free = self.free[:PAGES_EACH], self.free[PAGES_EACH:]
        return self.begin(pages, 4, chunk)

    @rule(t=transfers, count=st.integers(1, 8))
    def send(self, t: Transfer, count: int) -> None:
        for _ in range(count):
            if (frame := t.sender.next_frame()) is not None:
                t.on_the_way.append(frame)
                t.seen.append(frame)

    @rule(t=transfers, asks=st.booleans())
    def break_connection(self, t: Transfer, asks: bool) -> None:
        """``asks``: the link asks what is there; else it sends all again."""
        lost = sorted({f.header.sequence for f in t.on_the_way} | set(t.acks) | {f.header.sequence for f in t.writing})
        t.on_the_way.clear()
        t.acks.clear()
        for sequence, _ in t.answers:
            t.sender.question_lost(sequence)
        t.answers.clear()
        for sequence in lost:
            if asks:
                t.sender.doubt(sequence, "cut")
            else:
                t.sender.lost(sequence, "cut")

    @rule(t=transfers)
    def ask(self, t: Transfer) -> None:
        """The answer is on its way from now on, and true of this moment only."""
        if (sequence := t.sender.next_question()) is not None:
            mine = t.epoch == self.epoch
            t.answers.append((sequence, t.receiver.placed_rectangles() if mine else None))

    @rule(t=transfers)
    def hear_answers(self, t: Transfer) -> None:
        for sequence, placed in t.answers:
            if placed is None:
                t.sender.nacked(NackReason.FENCED if t.epoch == self.epoch else NackReason.EPOCH)
            else:
                t.sender.answered(sequence, placed)
        t.answers.clear()

    def deliver(self, t: Transfer, frame: OutgoingFrame) -> None:
        if frame.header.epoch != self.epoch:
            t.sender.nacked(NackReason.EPOCH)
            return
        try:
            admission = t.receiver.begin(frame.header)
        except FrameError:  # of a sender that went on elsewhere: its chunks were cut otherwise
            t.receiver.fence()
            t.sender.nacked(NackReason.REFUSED)
            return
        if admission is Admission.PLACE:
            t.writing.append(frame)
        elif admission is Admission.AGAIN:
            t.acks.append(frame.header.sequence)
        elif admission is Admission.DEAD:
            t.sender.nacked(NackReason.FENCED)

    @rule(t=transfers, data=st.data())
    def arrive_in_any_order(self, t: Transfer, data: st.DataObject) -> None:
        if t.on_the_way:
            self.deliver(t, t.on_the_way.pop(data.draw(st.integers(0, len(t.on_the_way) - 1))))

    @rule(t=transfers, count=st.integers(1, 4))
    def rush(self, t: Transfer, count: int) -> None:
        """Sent and arrived at once; being written from now on."""
        self.send(t, count)
        while t.on_the_way:
            self.deliver(t, t.on_the_way.pop())

    @rule(t=transfers, data=st.data())
    def arrive_again_or_late(self, t: Transfer, data: st.DataObject) -> None:
        if t.seen:
            self.deliver(t, t.seen[data.draw(st.integers(0, len(t.seen) - 1))])

    @rule(t=transfers, data=st.data())
    def finish_a_write(self, t: Transfer, data: st.DataObject) -> None:
        if t.writing:
            self.write(t, t.writing.pop(data.draw(st.integers(0, len(t.writing) - 1))))

    def write(self, t: Transfer, frame: OutgoingFrame) -> None:
        assert self.owns(t), "a write reached pages of another owner"
        block = frame.block
        write_block(self.pool, t.table, KVBlock(block.plane, block.layers, block.tokens, block.heads, np.ascontiguousarray(block.values)))
        t.receiver.placed(frame.header)
        t.acks.append(frame.header.sequence)

    @rule(t=transfers)
    def fail_a_write(self, t: Transfer) -> None:
        if t.writing:
            t.receiver.place_failed(t.writing.pop().header)
            t.sender.nacked(NackReason.FAILED)

    @rule(t=transfers)
    def hear_acks(self, t: Transfer) -> None:
        for sequence in t.acks:
            t.sender.acked(sequence)
        t.acks.clear()

    @rule(t=transfers)
    def adopt(self, t: Transfer) -> None:
        if t.receiver.state is ReceiverState.COMPLETE:
            t.receiver.adopt()

    @rule(t=transfers)
    def cancel_at_the_sender(self, t: Transfer) -> None:
        t.sender.cancel()

    @precondition(lambda self: any(t.seen for t in self.all))
    @rule(t=transfers, chunk=st.integers(1, 6))
    def the_sender_dies_and_another_goes_on(self, t: Transfer, chunk: int) -> None:
        """With chunks of its own, to the same transfer."""
        t.sender.fail(TransferFailed("INTERNAL", "killed"))
        t.acks.clear()
        t.answers.clear()
        t.sender = Sender(SPEC, t.receiver.transfer_id, t.epoch, TOKENS, resume=True)
        # Sequences are each sender's own: of the dead one's frames only the bytes are left.
        t.on_the_way.clear()
        t.seen.clear()
        if not t.writing:
            self.push_all(t.sender, t.planes, chunk)
        else:
            t.sender.cancel()  # its frames could meet those that are being written; the link fails such a transfer

    @rule(t=transfers)
    def expire(self, t: Transfer) -> None:
        """The owner's deadline: fence, and return the pages as soon as that is allowed."""
        t.receiver.fence()
        self.release(t)

    @rule(t=transfers)
    def release(self, t: Transfer) -> None:
        if t.may_return_pages and t.epoch == self.epoch:
            self.give_back(t)

    @precondition(lambda self: sum(len(t.seen) for t in self.all) > 6)
    @rule()
    def restart_the_receiver(self) -> None:
        """All its memory is gone and with it every writer; frames to its earlier life still arrive and must reach nothing."""
        self.epoch += 1
        for t in self.all:
            self.break_connection(t, asks=True)
            t.writing.clear()
        self.past += self.all
        self.all = []
        self.pool = KVPool.zeros(head_major(PAGE_SIZE, "float32"), SPEC, NUM_PAGES)
        self.free, self.owner = list(range(NUM_PAGES)), {}

    @rule(target=transfers, t=consumes(transfers))
    def run_to_the_end(self, t: Transfer) -> object:
        """Nothing goes wrong from here on: what was not cut off gets there."""
        for _ in range(20):
            if t.sender.state is not SenderState.OPEN:
                break
            self.break_connection(t, asks=True)
            self.ask(t)
            self.hear_answers(t)
            self.send(t, 99)
            while t.on_the_way:
                self.deliver(t, t.on_the_way.pop())
            while t.writing:
                self.write(t, t.writing.pop(0))
            self.hear_acks(t)
        assert t.sender.state is not SenderState.OPEN, "a sender that owes nothing has ended"
        return multiple(t)

    @invariant()
    def no_page_has_a_live_writer_and_another_owner(self) -> None:
        for t in self.all:
            assert len(t.writing) == t.receiver.num_writers
            if t.receiver.num_writers:
                assert self.owns(t)
            if t.receiver.state in (ReceiverState.COMPLETE, ReceiverState.ADOPTED, ReceiverState.DRAINED, ReceiverState.RELEASED):
                assert t.receiver.num_writers == 0
            if t.receiver.state is not ReceiverState.RELEASED:
                assert self.owns(t)
        for t in self.past:
            assert not t.writing

    @invariant()
    def complete_means_exact(self) -> None:
        for t in self.all:
            if t.receiver.state in (ReceiverState.COMPLETE, ReceiverState.ADOPTED):
                for block, values in zip(read_blocks(self.pool, t.table, TOKENS), t.planes.values(), strict=True):
                    assert np.array_equal(bits(block.values), bits(values[:, TOKENS.start :]))
                assert t.receiver.report.bytes == TOTAL_BYTES

    @invariant()
    def done_means_placed(self) -> None:
        for t in self.all + self.past:
            if t.sender.state is SenderState.DONE:
                assert t.receiver.report.bytes == t.sender.report.bytes == TOTAL_BYTES
            if t.sender.state is SenderState.OPEN:
                assert t.sender.owed_bytes + t.sender.report.bytes == TOTAL_BYTES
            assert t.sender.owed_bytes >= 0

    @invariant()
    def pages_are_accounted_for(self) -> None:
        assert sorted([*self.free, *self.owner]) == list(range(NUM_PAGES))


HostileNetwork.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHostileNetwork = HostileNetwork.TestCase
