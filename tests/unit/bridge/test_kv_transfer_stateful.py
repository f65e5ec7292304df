"""Transfers through a hostile network onto a small page pool: in whatever order, no page is written by a transfer that does not own it,
and what is adopted is exact. The state machines run as the links run them; the network here loses, repeats and reorders."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, read_blocks, write_block
from pddbridge.kv_layout import head_major
from pddbridge.kv_sender import OutgoingFrame, Sender, SenderState
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.kv_transfer import Admission, Receiver, ReceiverState
from pddbridge.kv_wire import NackReason
from tests.support.kv import bits, blocks_of, random_planes

SPEC = KVSpec.gqa(2, 2, 2, "float32")
PAGE_SIZE, NUM_PAGES = 4, 6
TOKENS = TokenRange(1, 7)
PAGES_EACH = 2


@dataclass
class Transfer:
    """Both ends of one transfer and what travels between them."""

    sender: Sender
    receiver: Receiver
    planes: dict[str, np.ndarray]
    table: np.ndarray
    on_the_way: list[OutgoingFrame] = field(default_factory=list)
    seen: list[OutgoingFrame] = field(default_factory=list)
    acks: list[int] = field(default_factory=list)
    writing: list[OutgoingFrame] = field(default_factory=list)


class HostileNetwork(RuleBasedStateMachine):
    transfers = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool.zeros(head_major(PAGE_SIZE, "float32"), SPEC, NUM_PAGES)
        self.free = list(range(NUM_PAGES))
        self.owner: dict[int, int] = {}
        self.all: list[Transfer] = []

    def owns(self, transfer: Transfer) -> bool:
        return all(self.owner.get(int(page)) == transfer.receiver.transfer_id for page in transfer.table)

    @precondition(lambda self: len(self.free) >= PAGES_EACH)
    @rule(target=transfers, max_attempts=st.integers(1, 4), chunk=st.integers(1, 6))
    def start(self, max_attempts: int, chunk: int) -> Transfer:
        transfer_id = len(self.all) + 1
        pages, self.free = self.free[:PAGES_EACH], self.free[PAGES_EACH:]
        self.owner.update(dict.fromkeys(pages, transfer_id))
        receiver = Receiver(SPEC, transfer_id, TOKENS)
        receiver.expect()
        sender = Sender(SPEC, transfer_id, 1, TOKENS, max_attempts=max_attempts)
        planes = random_planes(SPEC, TOKENS.stop, seed=transfer_id)
        for first in range(TOKENS.start, TOKENS.stop, chunk):
            for block in blocks_of(SPEC, planes, TokenRange(first, min(first + chunk, TOKENS.stop))):
                sender.push(block)
        transfer = Transfer(sender, receiver, planes, np.array(pages))
        self.all.append(transfer)
        return transfer

    @rule(t=transfers, count=st.integers(1, 8))
    def send(self, t: Transfer, count: int) -> None:
        for _ in range(count):
            if (frame := t.sender.next_frame()) is not None:
                t.on_the_way.append(frame)
                t.seen.append(frame)

    @rule(t=transfers)
    def break_connection(self, t: Transfer) -> None:
        lost = sorted({f.header.sequence for f in t.on_the_way} | set(t.acks) | {f.header.sequence for f in t.writing})
        t.on_the_way.clear()
        t.acks.clear()
        for sequence in lost:
            t.sender.lost(sequence, "cut")

    def deliver(self, t: Transfer, frame: OutgoingFrame) -> None:
        admission = t.receiver.begin(frame.header)
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

    @rule(t=transfers, data=st.data())
    def arrive_again_or_late(self, t: Transfer, data: st.DataObject) -> None:
        if t.seen:
            self.deliver(t, t.seen[data.draw(st.integers(0, len(t.seen) - 1))])

    @rule(t=transfers, data=st.data())
    def finish_a_write(self, t: Transfer, data: st.DataObject) -> None:
        if not t.writing:
            return
        frame = t.writing.pop(data.draw(st.integers(0, len(t.writing) - 1)))
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

    @rule(t=transfers)
    def fence(self, t: Transfer) -> None:
        t.receiver.fence()

    @rule(t=transfers)
    def release(self, t: Transfer) -> None:
        if t.receiver.state in (ReceiverState.DRAINED, ReceiverState.ADOPTED):
            t.receiver.release()
            for page in t.table.tolist():
                del self.owner[page]
                self.free.append(page)

    @rule(target=transfers, t=consumes(transfers))
    def run_to_the_end(self, t: Transfer) -> object:
        """Nothing goes wrong from here on: what was not cut off gets there."""
        while t.sender.num_owed and t.sender.state is SenderState.OPEN:
            self.break_connection(t)
            if t.sender.num_queued == 0:
                return multiple(t)
            self.send(t, 99)
            while t.on_the_way:
                self.deliver(t, t.on_the_way.pop())
            while t.writing:
                frame = t.writing.pop(0)
                assert self.owns(t)
                write_block(self.pool, t.table, frame.block)
                t.receiver.placed(frame.header)
                t.acks.append(frame.header.sequence)
            self.hear_acks(t)
        if t.sender.state is SenderState.OPEN:
            raise AssertionError("a sender that owes nothing has ended")
        return multiple(t)

    @invariant()
    def released_means_no_writer(self) -> None:
        for t in self.all:
            assert len(t.writing) == t.receiver.num_writers
            if t.receiver.state in (ReceiverState.COMPLETE, ReceiverState.ADOPTED, ReceiverState.DRAINED, ReceiverState.RELEASED):
                assert t.receiver.num_writers == 0
            if t.receiver.state is not ReceiverState.RELEASED:
                assert self.owns(t)

    @invariant()
    def complete_means_exact(self) -> None:
        for t in self.all:
            if t.receiver.state in (ReceiverState.COMPLETE, ReceiverState.ADOPTED):
                for block, values in zip(read_blocks(self.pool, t.table, TOKENS), t.planes.values(), strict=True):
                    assert np.array_equal(bits(block.values), bits(values[:, TOKENS.start :]))
                assert t.receiver.report.bytes == len(TOKENS) * SPEC.bytes_per_token

    @invariant()
    def done_means_placed(self) -> None:
        for t in self.all:
            if t.sender.state is SenderState.DONE:
                assert t.receiver.report.bytes == t.sender.report.bytes == len(TOKENS) * SPEC.bytes_per_token

    @invariant()
    def pages_are_accounted_for(self) -> None:
        assert sorted([*self.free, *self.owner]) == list(range(NUM_PAGES))


HostileNetwork.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostileNetwork = HostileNetwork.TestCase
