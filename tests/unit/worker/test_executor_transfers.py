"""The executor with the in-test engine: KV that is pushed to others, and that comes from them."""

from __future__ import annotations

import itertools

import pytest

from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pddbridge.kv_spec import TokenRange
from tests.support.executor_driver import PROMPT, ExecutorDriver
from tests.support.fake_engine import FakeEngine, expected_log


@pytest.mark.parametrize("primed", [0, 3, 8, 11, 22, 23])
@pytest.mark.parametrize("window", [1, 1 << 20])
def test_a_receiver_gets_what_it_lacks_and_continues_as_a_single_engine_would(primed: int, window: int) -> None:
    receiver = ExecutorDriver(FakeEngine(page_size=8))
    if primed:
        receiver.open("earlier", [*PROMPT[:primed], 7, 7, 7, 7, 7, 7, 7, 7, 7])
        receiver.run()
        receiver.close("earlier")
    before = receiver.snapshot()
    receiver.open("r", PROMPT, transfer=True)
    (reserved,) = receiver.of("r", m.Reserved)
    hit = min(primed, 22)
    assert reserved == m.Reserved(hit, TokenRange(hit, 22) if hit < 22 else None)
    assert not receiver.of("r", m.Tokens)
    if reserved.missing is not None:
        sender = ExecutorDriver(FakeEngine(page_size=12), limits=ExecutorLimits(push_window_bytes=window, push_piece_bytes=400))
        sender.open("p", PROMPT, decode=False, push_to=[m.PushTo("main", hit)])
        sender.run()
        done = 0
        while done < len(sender.of("p", m.KVRead)):
            read = sender.of("p", m.KVRead)[done]
            receiver.place("r", read.blocks)
            sender.executor.handle(m.PushAcknowledged("p", "main", sum(block.values.nbytes for block in read.blocks)))
            done += 1
        num_bytes = sum(block.values.nbytes for read in sender.of("p", m.KVRead) for block in read.blocks)
        assert num_bytes == (22 - hit) * receiver.engine.kv_spec.bytes_per_token
        receiver.executor.handle(m.TransferComplete("r", num_bytes, num_bytes))
        assert receiver.of("r", m.KvComplete) == [m.KvComplete(22 - hit, num_bytes, num_bytes)]
        sender.close("p")
        sender.assert_idle()
    else:
        assert receiver.of("r", m.KvComplete) == [m.KvComplete(0, 0, 0)]
    receiver.run()
    assert receiver.log("r") == expected_log(PROMPT, 8)
    assert receiver.snapshot().counters.computed_prompt_tokens == before.counters.computed_prompt_tokens
    receiver.close("r")
    receiver.assert_idle()


def test_prefix_hits_of_the_prefill_worker_are_pushed_too() -> None:
    sender = ExecutorDriver(FakeEngine(page_size=12))
    sender.open("warm", PROMPT[:20], decode=False)
    sender.run()
    sender.close("warm")
    sender.open("p", PROMPT, decode=False, push_to=[m.PushTo("main", 5)])
    sender.run()
    reads = sorted((read.tokens.start, read.tokens.stop) for read in sender.of("p", m.KVRead))
    assert (reads[0][0], reads[-1][1]) == (5, 22)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(reads))


def test_two_targets_share_reads_and_a_slow_one_does_not_hold_up_the_other() -> None:
    limits = ExecutorLimits(push_window_bytes=5 * 192, push_piece_bytes=5 * 192)
    sender = ExecutorDriver(FakeEngine(max_step_tokens=64), limits=limits)
    sender.open("p", PROMPT, decode=False, push_to=[m.PushTo("relay", 0), m.PushTo("main", 10)])
    sender.run()

    def reads(target: str) -> list[tuple[int, int]]:
        return [(r.tokens.start, r.tokens.stop) for r in sender.of("p", m.KVRead) if target in r.targets]

    assert (reads("relay"), reads("main")) == ([(0, 5)], [(10, 15)])
    for _ in range(4):
        sender.executor.handle(m.PushAcknowledged("p", "relay", 5 * 192))
    assert reads("relay") == [(0, 5), (5, 10), (10, 15), (15, 20), (20, 22)]
    assert reads("main") == [(10, 15)]
    sender.executor.handle(m.PushAcknowledged("p", "main", 5 * 192))
    sender.executor.handle(m.PushAcknowledged("p", "main", 5 * 192))
    assert reads("main") == [(10, 15), (15, 20), (20, 22)]
    sender.close("p")
    sender.assert_idle()


def test_targets_at_one_position_are_read_for_once() -> None:
    sender = ExecutorDriver(FakeEngine(max_step_tokens=64))
    sender.open("p", PROMPT, decode=False, push_to=[m.PushTo("relay", 0), m.PushTo("main", 10)])
    sender.run()
    engine = sender.engine
    assert isinstance(engine, FakeEngine)
    assert sorted((r.start, r.stop) for r in engine.reads) == [(0, 10), (10, 22)]
