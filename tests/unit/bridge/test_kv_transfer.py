"""Receiver and sender of one transfer, over the wire's own bytes. Cases 1, 4, 6, 10 of what users reported, then the receiver's rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, read_block, read_blocks, write_block
from pddbridge.kv_layout import KVLayout, head_major, interleaved_heads, shard_heads, token_major
from pddbridge.kv_sender import OutgoingFrame, Sender, SenderState
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_transfer import Admission, FrameError, Receiver, ReceiverState
from pddbridge.kv_wire import (
    FrameHeader,
    block_of,
    decode_frame_header,
    empty_values,
    encode_frame_header,
    payload_view,
)
from tests.support.kv import bits, blocks_of, coded_planes, fill_slowly, frames_of, random_planes

SPEC = KVSpec.gqa(2, 3, 4, "float32")


def over_the_wire(spec: KVSpec, frame: OutgoingFrame) -> tuple[FrameHeader, KVBlock]:
    """What a receiver makes of a frame's bytes."""
    header = decode_frame_header(encode_frame_header(frame.header), spec)
    values = empty_values(header, spec)
    payload_view(values)[:] = payload_view(frame.block.values)
    return header, block_of(header, spec, values)


def receiving(spec: KVSpec, tokens: TokenRange) -> Receiver:
    receiver = Receiver(spec, 1, tokens)
    receiver.expect()
    return receiver


def header(
    tokens: TokenRange, *, layers: LayerRange | None = None, heads: HeadRange | None = None, plane: int = 0, crc: int = 7
) -> FrameHeader:
    """A header for SPEC, as if decoded."""
    sender = Sender(SPEC, 1, 9, tokens)
    layers, heads = layers or LayerRange(0, 2), heads or HeadRange(0, 3)
    values = np.zeros((len(layers), len(tokens), len(heads), 4), np.float32)
    sender.push(KVBlock("kv"[plane], layers, tokens, heads, values))
    frame = sender.next_frame()
    assert frame is not None
    return replace(frame.header, payload_crc=crc)


@pytest.mark.parametrize("num_targets", [1, 2, 4])
@pytest.mark.parametrize("num_senders", [1, 2, 4])
@pytest.mark.parametrize("replicas_send", [False, True])
def test_case_1_head_shards_of_any_number_on_both_sides(num_senders: int, num_targets: int, replicas_send: bool) -> None:
    """Two KV heads, so four shards hold each head twice. As long as one head's senders are held back, it is not complete."""
    spec = KVSpec.gqa(3, 2, 4, "float32")
    tokens = TokenRange(3, 21)
    planes = coded_planes(spec, tokens.stop)
    table_a, table_b = np.array([4, 1, 3]), np.array([2, 5, 0, 3])
    shards = []
    for shard in range(num_senders):
        heads = shard_heads(2, shard, num_senders)
        layout = KVLayout("interleaved_heads", 1, ("page", "slot", "plane_head", "dim"), 8, "float32", heads)
        pool = KVPool.zeros(layout, spec, 5)
        fill_slowly(pool, table_a, planes, LayerRange(0, 3), TokenRange(0, tokens.stop), heads)
        shards.append((heads, pool))
    if not replicas_send:
        shards = [pair for i, pair in enumerate(shards) if i == 0 or shards[i - 1][0] != pair[0]]
    targets = [
        KVPool.zeros(KVLayout("head_major", 1, ("page", "head", "slot", "dim"), 6, "float32", shard_heads(2, shard, num_targets)), spec, 6)
        for shard in range(num_targets)
    ]
    held_back = shards[0][0]
    receiver = receiving(spec, tokens)

    def send(heads: HeadRange, pool: KVPool) -> None:
        sender = Sender(spec, 1, 9, tokens, heads)
        for block in read_blocks(pool, table_a, tokens):
            sender.push(block)
        for frame in frames_of(sender):
            head, block = over_the_wire(spec, frame)
            admission = receiver.begin(head)
            if admission is Admission.PLACE:
                for target in targets:
                    stored = target.layout.heads
                    assert stored is not None
                    low, high = max(stored.start, block.heads.start), min(stored.stop, block.heads.stop)
                    if low < high:
                        part = np.ascontiguousarray(block.values[:, :, low - block.heads.start : high - block.heads.start])
                        write_block(target, table_b, KVBlock(block.plane, block.layers, block.tokens, HeadRange(low, high), part))
                receiver.placed(head)
            else:
                assert admission is Admission.AGAIN  # a replica's copy of the same head
            sender.acked(head.sequence)
        assert sender.state is SenderState.DONE

    for heads, pool in shards:
        if heads != held_back:
            send(heads, pool)
    assert receiver.state is ReceiverState.RECEIVING
    for heads, pool in shards:
        if heads == held_back:
            send(heads, pool)
    assert receiver.state is ReceiverState.COMPLETE
    for target in targets:
        stored = target.layout.heads
        assert stored is not None
        for plane, values in planes.items():
            got = read_block(target, table_b, plane, LayerRange(0, 3), tokens, stored).values
            assert np.array_equal(got, values[:, tokens.start : tokens.stop, stored.start : stored.stop])


def test_case_1_without_one_shard_the_pages_come_back() -> None:
    tokens = TokenRange(0, 4)
    receiver = receiving(SPEC, tokens)
    parts = [header(tokens, heads=shard_heads(3, shard, 3), plane=plane) for plane in range(2) for shard in range(3)]
    for part in parts[:-1]:
        receiver.begin(part)
        receiver.placed(part)
    assert receiver.state is ReceiverState.RECEIVING
    receiver.fence()  # the owner's deadline
    receiver.release()
    assert receiver.begin(parts[-1]) is Admission.DEAD


@pytest.mark.parametrize("source", [interleaved_heads, head_major, token_major])
@pytest.mark.parametrize("target", [interleaved_heads, head_major, token_major])
def test_case_4_page_size_equal_to_the_number_of_heads(source: object, target: object) -> None:
    spec = KVSpec.gqa(2, 4, 3, "float32")
    tokens = TokenRange(2, 15)
    planes = coded_planes(spec, 15)
    assert callable(source)
    assert callable(target)
    a, b = KVPool.zeros(source(4, "float32"), spec, 5), KVPool.zeros(target(4, "float32"), spec, 4)
    table_a, table_b = np.array([4, 0, 3, 1]), np.array([1, 2, 0, 3])
    fill_slowly(a, table_a, planes, LayerRange(0, 2), TokenRange(0, 15), HeadRange(0, 4))
    transfer(spec, tokens, read_blocks(a, table_a, tokens), b, table_b)
    for block, values in zip(read_blocks(b, table_b, tokens), planes.values(), strict=True):
        assert np.array_equal(block.values, values[:, 2:])


def transfer(spec: KVSpec, tokens: TokenRange, blocks: tuple[KVBlock, ...], pool: KVPool, table: np.ndarray) -> Receiver:
    sender, receiver = Sender(spec, 1, 9, tokens), receiving(spec, tokens)
    for block in blocks:
        sender.push(block)
    for frame in frames_of(sender):
        head, block = over_the_wire(spec, frame)
        assert receiver.begin(head) is Admission.PLACE
        write_block(pool, table, block)
        receiver.placed(head)
        sender.acked(head.sequence)
    assert sender.state is SenderState.DONE
    assert receiver.state is ReceiverState.COMPLETE
    return receiver


@pytest.mark.parametrize("j", range(8))
def test_case_6_exactly_the_tokens_sent_are_valid(j: int) -> None:
    """Pages of 8, r = 16 + j tokens sent: slots from r on keep what was there, NaN; the report says r."""
    tokens = TokenRange(0, 16 + j)
    planes = random_planes(SPEC, 16 + j, seed=j)
    pool, table = KVPool.zeros(head_major(8, "float32"), SPEC, 4), np.array([3, 1, 2])
    for arrays in pool.arrays:
        for array in arrays:
            array[...] = np.nan
    receiver = transfer(SPEC, tokens, tuple(blocks_of(SPEC, planes, tokens)), pool, table)
    assert receiver.report.tokens == tokens
    assert receiver.report.bytes == len(tokens) * SPEC.bytes_per_token
    for block, values in zip(read_blocks(pool, table, TokenRange(0, 24)), planes.values(), strict=True):
        assert np.array_equal(bits(block.values[:, : 16 + j]), bits(values))
        assert np.isnan(block.values[:, 16 + j :]).all()


@pytest.mark.parametrize("hit", [3, 8, 11])
def test_case_10_shuffled_chunks_behind_a_prefix_hit(hit: int) -> None:
    """Chunks of 8 from the hit on, a short tail, shuffled: placed by their ranges. Overlaps are refused, a gap never completes."""
    tokens = TokenRange(hit, 30)
    planes = coded_planes(SPEC, 30)
    a, table_a = KVPool.zeros(interleaved_heads(8, "float32"), SPEC, 5), np.array([4, 2, 0, 1])
    fill_slowly(a, table_a, planes, LayerRange(0, 2), TokenRange(0, 30), HeadRange(0, 3))
    b, table_b = KVPool.zeros(head_major(12, "float32"), SPEC, 3), np.array([2, 0, 1])
    sender, receiver = Sender(SPEC, 1, 9, tokens), receiving(SPEC, tokens)
    for start in range(hit, 30, 8):
        for block in read_blocks(a, table_a, TokenRange(start, min(start + 8, 30))):
            sender.push(block)
    frames = frames_of(sender)
    order = np.random.default_rng(hit).permutation(len(frames))
    for i in order[:-1]:
        head, block = over_the_wire(SPEC, frames[i])
        assert receiver.begin(head) is Admission.PLACE
        write_block(b, table_b, block)
        receiver.placed(head)
    assert receiver.state is ReceiverState.RECEIVING
    arrived = frames[order[0]].header.tokens
    for start, stop in ((arrived.start, arrived.stop - 1), (arrived.start + 1, arrived.stop), (hit - 1, hit), (29, 31), (hit, 30)):
        with pytest.raises(FrameError):
            receiver.begin(header(TokenRange(start, stop), plane=frames[order[0]].header.plane))
    head, block = over_the_wire(SPEC, frames[order[-1]])
    assert receiver.begin(head) is Admission.PLACE
    write_block(b, table_b, block)
    receiver.placed(head)
    assert receiver.state is ReceiverState.COMPLETE
    for block, values in zip(read_blocks(b, table_b, tokens), planes.values(), strict=True):
        assert np.array_equal(block.values, values[:, hit:])


def test_an_exact_duplicate_is_acknowledged_without_placing() -> None:
    receiver = receiving(SPEC, TokenRange(0, 10))
    head = header(TokenRange(0, 4))
    assert receiver.begin(head) is Admission.PLACE
    assert receiver.begin(head) is Admission.WAIT
    assert receiver.num_writers == 1
    receiver.placed(head)
    assert receiver.begin(replace(head, sequence=77)) is Admission.AGAIN
    assert receiver.num_writers == 0
    assert (receiver.report.num_frames, receiver.report.num_repeated, receiver.report.bytes) == (1, 2, head.payload_bytes)
    with pytest.raises(FrameError, match="other bytes"):
        receiver.begin(replace(head, payload_crc=8))


@pytest.mark.parametrize(
    "other",
    [
        header(TokenRange(3, 5)),
        header(TokenRange(0, 3)),
        header(TokenRange(0, 4), layers=LayerRange(1, 2)),
        header(TokenRange(0, 4), heads=HeadRange(2, 3)),
        header(TokenRange(0, 11)),
        header(TokenRange(10, 12)),
    ],
)
def test_partial_overlap_and_strangers_are_refused_before_and_after_placing(other: FrameHeader) -> None:
    receiver = receiving(SPEC, TokenRange(0, 10))
    head = header(TokenRange(0, 4))
    receiver.begin(head)
    with pytest.raises(FrameError):
        receiver.begin(other)
    receiver.placed(head)
    with pytest.raises(FrameError):
        receiver.begin(other)
    assert receiver.begin(header(TokenRange(4, 10))) is Admission.PLACE


def test_complete_only_when_every_cell_is_placed() -> None:
    receiver = receiving(SPEC, TokenRange(2, 4))
    parts = [
        header(TokenRange(t, t + 1), layers=LayerRange(layer, layer + 1), heads=HeadRange(h, h + 1), plane=p)
        for p in range(2)
        for layer in range(2)
        for t in (2, 3)
        for h in range(3)
    ]
    for part in parts:
        assert receiver.state is ReceiverState.RECEIVING
        receiver.begin(part)
    assert receiver.state is ReceiverState.RECEIVING  # all admitted, none placed
    for part in parts:
        receiver.placed(part)
    assert receiver.state is ReceiverState.COMPLETE
    receiver.adopt()
    receiver.fence()
    assert receiver.state is ReceiverState.ADOPTED
    receiver.release()
    assert receiver.begin(parts[0]) is Admission.AGAIN  # its ack was lost; the pages are not touched
    assert receiver.begin(header(TokenRange(2, 4))) is Admission.DEAD


def test_a_fenced_transfer_drains_when_its_last_writer_ends() -> None:
    receiver = receiving(SPEC, TokenRange(0, 10))
    first, second = header(TokenRange(0, 4)), header(TokenRange(4, 6))
    receiver.begin(first)
    receiver.begin(second)
    receiver.fence()
    with pytest.raises(ValueError, match="fenced"):
        receiver.release()
    receiver.placed(first)
    assert receiver.state is ReceiverState.FENCED
    receiver.place_failed(second)
    assert receiver.state is ReceiverState.DRAINED
    receiver.release()
    for head in (first, second, header(TokenRange(6, 10)), replace(first, payload_crc=1), header(TokenRange(90, 99))):
        assert receiver.begin(head) is Admission.DEAD


def test_a_complete_transfer_that_nobody_adopts_can_be_fenced() -> None:
    receiver = receiving(SPEC, TokenRange(0, 1))
    parts = [header(TokenRange(0, 1), plane=plane) for plane in range(2)]
    for part in parts:
        receiver.begin(part)
        receiver.placed(part)
    receiver.fence()
    assert receiver.state is ReceiverState.DRAINED
    receiver.release()
    assert receiver.begin(parts[0]) is Admission.DEAD


def test_states_that_may_not_be_left_that_way() -> None:
    receiver = Receiver(SPEC, 1, TokenRange(0, 1))
    assert receiver.begin(header(TokenRange(0, 1))) is Admission.DEAD
    for act in (receiver.adopt, receiver.release):
        with pytest.raises(ValueError, match="is reserved"):
            act()
    receiver.expect()
    with pytest.raises(ValueError, match="is receiving"):
        receiver.expect()
    with pytest.raises(ValueError, match="empty"):
        Receiver(SPEC, 1, TokenRange(5, 5))
    with pytest.raises(ValueError, match="empty"):
        Sender(SPEC, 1, 1, TokenRange(5, 5))
    with pytest.raises(ValueError, match="transfer_id"):
        Sender(SPEC, 0, 1, TokenRange(5, 6))
