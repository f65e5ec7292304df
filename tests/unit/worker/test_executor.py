"""The executor with the in-test engine: what a request does, what it is told, and that every page comes back."""

from __future__ import annotations

import itertools

import pytest

from pdd.errors import Code
from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pddbridge.engine import Step
from pddbridge.kv_spec import TokenRange
from pddbridge.sampling_params import SamplingParams
from tests.support.executor_driver import ExecutorDriver
from tests.support.fake_engine import FakeEngine, expected_log

PROMPT = list(range(40, 63))  # 23 tokens: two pages of 8 and a tail


def transferred(prompt: list[int], start: int = 0) -> ExecutorDriver:
    """A prefill worker that has ``prompt`` computed and read for a receiver that lacks it from ``start`` on."""
    driver = ExecutorDriver(FakeEngine(page_size=12))
    driver.open("p", prompt, decode=False, push_to=[m.PushTo("main", start)])
    driver.run()
    return driver


def move(sender: ExecutorDriver, receiver: ExecutorDriver, request_id: str) -> None:
    num_bytes = 0
    for read in sender.of("p", m.KVRead):
        receiver.place(request_id, read.blocks)
        num_bytes += sum(block.values.nbytes for block in read.blocks)
    receiver.executor.handle(m.TransferComplete(request_id, num_bytes, num_bytes))


def computed(driver: ExecutorDriver) -> tuple[int, int, int]:
    """Prompt and log positions computed, tokens sampled."""
    counters = driver.snapshot().counters
    return counters.computed_prompt_tokens, counters.computed_log_tokens, counters.sampled_tokens


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 23])
@pytest.mark.parametrize("max_step_tokens", [1, 5, 16, 64])
def test_a_single_engine_run_equals_the_model(length: int, max_step_tokens: int) -> None:
    driver = ExecutorDriver(FakeEngine(max_step_tokens=max_step_tokens))
    driver.open("r", PROMPT[:length])
    driver.run()
    assert driver.log("r") == expected_log(PROMPT[:length], 8)
    assert driver.kinds("r")[:2] == ["Reserved", "Prefilled"]
    assert driver.of("r", m.Prefilled) == [m.Prefilled(length - 1)]
    assert computed(driver) == (length - 1, 8, 8)
    driver.close("r")
    driver.close("r")
    driver.assert_idle()


def test_prefill_computes_all_but_the_last_token_and_never_samples() -> None:
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, decode=False)
    driver.run()
    assert driver.kinds("r") == ["Reserved", "Prefilled"]
    assert computed(driver) == (22, 0, 0)
    driver.close("r")
    driver.assert_idle()


@pytest.mark.parametrize("length", [8, 16, 1, 9, 17, 23])
def test_the_same_prompt_again_hits_all_but_its_last_token(length: int) -> None:
    driver = ExecutorDriver(FakeEngine())
    for n in range(3):
        driver.open(f"r{n}", PROMPT[:length], max_tokens=12)
        driver.run()
        driver.close(f"r{n}")
        assert driver.log(f"r{n}") == expected_log(PROMPT[:length], 12)
        assert driver.of(f"r{n}", m.Reserved) == [m.Reserved(0 if n == 0 else length - 1, None)]
    driver.assert_idle()
    assert driver.snapshot().counters.computed_prompt_tokens == length - 1


@pytest.mark.parametrize("offset", range(8))
def test_a_hit_that_ends_inside_a_page_is_copied_and_leaves_the_source_alone(offset: int) -> None:
    other = [*PROMPT[: 8 + offset], 200, 201, 202, *PROMPT[11 + offset :]]
    driver = ExecutorDriver(FakeEngine())
    driver.open("a", PROMPT)
    driver.run()
    driver.close("a")
    driver.open("b", other)
    driver.run()
    driver.open("a2", PROMPT)
    driver.run()
    assert driver.of("b", m.Reserved)[0].hit_tokens == 8 + offset
    assert driver.log("b") == expected_log(other, 8)
    assert driver.log("a2") == expected_log(PROMPT, 8)
    for request_id in ("b", "a2"):
        driver.close(request_id)
    driver.assert_idle()


def test_a_running_prompt_is_found_by_those_that_come_after_its_prefill() -> None:
    driver = ExecutorDriver(FakeEngine())
    driver.open("a", PROMPT, max_tokens=40)
    while not driver.of("a", m.Prefilled):
        driver.step()
    driver.open("b", PROMPT, max_tokens=4)
    # All of it: two full pages from the cache, and the page that "a" goes on to write is copied.
    assert driver.of("b", m.Reserved)[0].hit_tokens == len(PROMPT) - 1
    driver.run()
    assert (driver.log("a"), driver.log("b")) == (expected_log(PROMPT, 40), expected_log(PROMPT, 4))


def test_a_page_that_is_being_filled_is_copied_as_far_as_the_tokens_agree() -> None:
    driver = ExecutorDriver(FakeEngine())
    driver.open("a", PROMPT, max_tokens=40)
    while not driver.of("a", m.Prefilled):
        driver.step()
    other = [*PROMPT[:19], 5, *PROMPT[20:]]
    assert other != list(PROMPT)
    driver.open("b", other, max_tokens=4)
    driver.open("c", other, max_tokens=4, tenant="another")
    assert [driver.of(name, m.Reserved)[0].hit_tokens for name in ("b", "c")] == [19, 0]
    driver.run()
    assert driver.log("b") == driver.log("c") == expected_log(other, 4)


def test_tenants_do_not_hit_each_other() -> None:
    driver = ExecutorDriver(FakeEngine())
    for tenant in ("alice", "bob"):
        driver.open(tenant, PROMPT, tenant=tenant)
        driver.run()
        driver.close(tenant)
        assert driver.of(tenant, m.Reserved)[0].hit_tokens == 0


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    driver = ExecutorDriver(FakeEngine(), use_prefix_cache=False)
    for request_id in ("a", "b"):
        driver.open(request_id, PROMPT)
        driver.run()
        driver.close(request_id)
        assert driver.of(request_id, m.Reserved)[0].hit_tokens == 0
        assert driver.log(request_id) == expected_log(PROMPT, 8)
    assert driver.snapshot().pages.free == 16


# Transfer and handoff.


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


@pytest.mark.parametrize("k", [0, 1, 2, 7, 8, 9])
@pytest.mark.parametrize("chunks", [1, 3])
def test_handoff_by_token_ids(k: int, chunks: int) -> None:
    log = expected_log(PROMPT, 12)
    main = ExecutorDriver(FakeEngine(max_step_tokens=4))
    main.open("r", PROMPT, transfer=True, decode=False, max_tokens=12)
    move(transferred(PROMPT), main, "r")
    main.run()
    if chunks > 1:
        for start in range(0, k, 3):
            main.ingest("r", start, log[start : min(start + 3, k)], decode=False)
            main.run()
            assert main.of("r", m.Ingested)[-1].length == min(start + 3, k)
        assert not main.log("r")
    main.ingest("r", 0, log[:k], decode=True)
    main.run()
    assert main.of("r", m.Ingested)[-1].length == k
    assert main.kinds("r").index("Tokens") > main.kinds("r").index("Ingested")
    assert main.log("r") == log[k:]
    snapshot = main.snapshot()
    assert (snapshot.counters.computed_prompt_tokens, snapshot.counters.computed_log_tokens) == (0, 12)
    main.close("r")
    main.assert_idle()


def test_an_ingest_is_answered_when_the_kv_of_all_but_its_last_token_is_here() -> None:
    driver = ExecutorDriver(FakeEngine(max_step_tokens=4))
    driver.open("r", PROMPT, decode=False)
    driver.run()
    driver.ingest("r", 0, expected_log(PROMPT, 9), decode=False)
    while not driver.of("r", m.Ingested):
        driver.step()
    assert computed(driver) == (22, 9, 0)  # the last prompt token and eight of the nine


def test_tokens_that_come_before_the_kv_wait_for_it() -> None:
    log = expected_log(PROMPT, 6)
    main = ExecutorDriver(FakeEngine())
    main.open("r", PROMPT, transfer=True, decode=False, max_tokens=6)
    main.ingest("r", 0, log[:3], decode=True)
    assert main.run() == 0
    move(transferred(PROMPT), main, "r")
    main.run()
    assert main.log("r") == log[3:]


def test_a_request_continues_from_its_log() -> None:
    log = expected_log(PROMPT, 10)
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, log=log[:6], max_tokens=10)
    driver.run()
    assert driver.of("r", m.Tokens)[0].position == 6
    assert driver.log("r") == log[6:]


@pytest.mark.parametrize(
    ("position", "ids", "message"),
    [
        (4, [1], "leaves a gap"),
        (1, [5], "holds token"),
        (3, [300], "outside the vocabulary"),
        (3, [-1], "outside"),
        (3, [1] * 90, "context"),
    ],
)
def test_an_ingest_that_does_not_fit_fails_the_request(position: int, ids: list[int], message: str) -> None:
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, decode=False, log=expected_log(PROMPT, 3))
    driver.run()
    driver.ingest("r", position, ids, decode=True)
    (failed,) = driver.of("r", m.Failed)
    assert failed.code is Code.INVALID_ARGUMENT
    assert message in failed.message
    assert driver.run() == 0
    driver.close("r")
    driver.assert_idle()


# Proposing ends.


def test_seal_ends_proposing_and_an_ingest_resumes() -> None:
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, max_tokens=20)
    while len(driver.log("r")) < 3:
        driver.step()
    driver.seal("r")
    assert driver.run() == 0
    assert driver.of("r", m.Sealed) == [m.Sealed(3)]
    driver.ingest("r", 0, driver.log("r"), decode=True)
    driver.run()
    assert driver.log("r") == expected_log(PROMPT, 20)


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_the_propose_limit_seals_by_itself(limit: int) -> None:
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, max_tokens=20, limit=limit)
    driver.run()
    assert driver.log("r") == expected_log(PROMPT, limit)
    assert driver.of("r", m.Sealed) == [m.Sealed(limit)]
    driver.ingest("r", limit, [], decode=True)
    driver.run()
    assert driver.log("r") == expected_log(PROMPT, 20)


def test_a_stop_token_ends_proposing_without_a_seal() -> None:
    log = expected_log(PROMPT, 8)
    stop = log.index(log[4])
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, params=SamplingParams(seed=1, max_tokens=20, stop_token_ids=frozenset({log[4]})))
    driver.run()
    assert driver.log("r") == log[: stop + 1]
    assert not driver.of("r", m.Sealed)


def test_an_ingested_stop_token_is_not_followed_by_another() -> None:
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, decode=False, params=SamplingParams(seed=1, max_tokens=20, stop_token_ids=frozenset({9})))
    driver.run()
    driver.ingest("r", 0, [5, 9], decode=True)
    driver.run()
    assert not driver.log("r")


def test_the_context_limit_seals() -> None:
    driver = ExecutorDriver(FakeEngine(max_context=26))
    driver.open("r", PROMPT, max_tokens=20)
    driver.run()
    assert driver.log("r") == expected_log(PROMPT, 3)
    assert driver.of("r", m.Sealed) == [m.Sealed(3)]


# Too few pages.


def test_a_request_that_can_never_fit_is_refused() -> None:
    driver = ExecutorDriver(FakeEngine(num_pages=2, max_context=100))
    driver.open("r", PROMPT)
    assert driver.of("r", m.Refused)[0].code is Code.RESOURCE_EXHAUSTED
    driver.assert_idle()


def test_requests_wait_for_pages_in_a_bounded_queue() -> None:
    driver = ExecutorDriver(FakeEngine(num_pages=4), limits=ExecutorLimits(max_waiting=1))
    for n in range(3):
        driver.open(f"r{n}", [100 + n, *PROMPT], decode=False)
    assert driver.kinds("r0") == ["Reserved"]
    assert driver.kinds("r1") == []
    assert driver.of("r2", m.Refused)[0].code is Code.RESOURCE_EXHAUSTED
    driver.run()
    driver.close("r0")
    driver.run()
    assert driver.kinds("r1") == ["Reserved", "Prefilled"]
    driver.close("r1")
    driver.assert_idle()


def test_a_page_is_left_for_the_growth_of_each_running_request() -> None:
    driver = ExecutorDriver(FakeEngine(num_pages=6))
    for n in range(2):
        driver.open(f"r{n}", [100 + n] * 15, max_tokens=20)
    driver.open("r2", [102] * 15, max_tokens=20)
    assert (driver.kinds("r1"), driver.kinds("r2")) == (["Reserved"], [])


def test_a_page_that_can_only_be_copied_from_or_evicted_is_evicted() -> None:
    driver = ExecutorDriver(FakeEngine(num_pages=3))
    driver.open("a", PROMPT, max_tokens=1)
    driver.run()
    driver.close("a")
    other = [*PROMPT[:3], *range(200, 220)]  # all three pages are needed: none is left to copy the first three tokens from
    driver.open("b", other, max_tokens=1)
    driver.run()
    assert driver.of("b", m.Reserved) == [m.Reserved(0, None)]
    assert driver.log("b") == expected_log(other, 1)
    driver.close("b")
    driver.assert_idle()


def test_a_waiting_request_has_a_deadline() -> None:
    driver = ExecutorDriver(FakeEngine(num_pages=4))
    driver.open("r0", PROMPT, decode=False)
    driver.open("r1", [1, *PROMPT], decode=False, deadline=5.0)
    assert driver.executor.next_deadline() == 5.0
    driver.executor.expire(4.9)
    assert driver.kinds("r1") == []
    driver.executor.expire(5.0)
    assert driver.of("r1", m.Failed)[0].code is Code.DEADLINE_EXCEEDED
    driver.close("r1")
    driver.close("r0")
    driver.assert_idle()


def test_the_youngest_is_preempted_and_recomputes_the_same_tokens() -> None:
    driver = ExecutorDriver(FakeEngine(num_pages=9, page_size=4))
    prompts = {"old": PROMPT[:10], "young": [99, *PROMPT[:9]]}
    for request_id, prompt in prompts.items():
        driver.open(request_id, prompt, max_tokens=20)
    for _ in range(300):
        driver.step()
        for request_id in prompts:
            if len(driver.log(request_id)) == 20:
                driver.close(request_id)
    assert driver.snapshot().preemptions >= 1
    for request_id, prompt in prompts.items():
        assert driver.log(request_id) == expected_log(prompt, 20)
        assert driver.kinds(request_id).count("Reserved") == driver.kinds(request_id).count("Prefilled") == 1
    driver.assert_idle()


def test_a_request_that_is_receiving_is_never_preempted() -> None:
    driver = ExecutorDriver(FakeEngine(num_pages=5, page_size=8))
    driver.open("decoding", PROMPT[:1], transfer=True, max_tokens=30)
    driver.open("receiving", PROMPT, transfer=True, decode=False)
    driver.run()
    assert 0 < len(driver.log("decoding")) < 30  # stands still for want of a page
    assert driver.snapshot().preemptions == 0
    move(transferred(PROMPT), driver, "receiving")
    driver.run()
    assert driver.log("decoding") == expected_log(PROMPT[:1], 30)
    assert driver.snapshot().preemptions == 1
    driver.close("decoding")
    driver.run()
    driver.ingest("receiving", 0, [], decode=True)
    driver.run()
    assert driver.log("receiving") == expected_log(PROMPT, 8)  # recomputed from its tokens
    assert driver.snapshot().counters.computed_prompt_tokens > 0  # so that the fallback is visible
    driver.close("receiving")
    driver.assert_idle()


def test_a_row_that_stands_still_leaves_its_place_to_another() -> None:
    limits = ExecutorLimits(push_window_bytes=1)  # nothing is acknowledged: the push stays open
    driver = ExecutorDriver(FakeEngine(num_pages=10, max_rows=1, max_step_tokens=1), limits=limits)
    driver.open("decoding", PROMPT[:1], transfer=True, max_tokens=30)
    driver.open("receiving", PROMPT, transfer=True, decode=False)
    driver.open("prefilling", [9] * 40, decode=False, push_to=[m.PushTo("main", 0)])
    driver.run()
    assert driver.of("prefilling", m.Prefilled) == [m.Prefilled(39)]
    assert 0 < len(driver.log("decoding")) < 30  # it wants a page, and nobody's may be taken
    assert driver.snapshot().preemptions == 0
    driver.close("receiving")
    driver.run()
    assert driver.log("decoding") == expected_log(PROMPT[:1], 30)


# Faults.


def test_a_failed_request_keeps_its_pages_until_it_is_closed() -> None:
    """Its transfer may still write them: only closing, after the fence, gives them back."""
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, transfer=True, deadline=5.0)
    driver.executor.expire(5.0)
    assert driver.of("r", m.Failed)[0].code is Code.DEADLINE_EXCEEDED
    assert driver.snapshot().pages.pinned == 3
    driver.close("r")
    driver.assert_idle()


def test_a_push_that_ended_is_read_for_no_more() -> None:
    limits = ExecutorLimits(push_window_bytes=1, push_piece_bytes=1)
    driver = ExecutorDriver(FakeEngine(), limits=limits)
    driver.open("p", PROMPT, decode=False, push_to=[m.PushTo("relay", 0), m.PushTo("main", 0)])
    driver.run()
    driver.executor.handle(m.PushEnded("p", "main"))
    for _ in range(30):
        driver.executor.handle(m.PushAcknowledged("p", "relay", 192))
        driver.executor.handle(m.PushAcknowledged("p", "main", 192))
    assert [read.targets for read in driver.of("p", m.KVRead)] == [("relay", "main"), *[("relay",)] * 21]
    driver.close("p")
    driver.assert_idle()


def test_a_failing_step_fails_its_requests_and_no_others() -> None:
    def broken(step: Step) -> None:
        if 250 in step.token_ids:
            raise RuntimeError("device on fire")

    driver = ExecutorDriver(FakeEngine(before_step=broken))
    driver.open("bad", [250, *PROMPT])
    driver.run()
    assert driver.of("bad", m.Failed) == [m.Failed(Code.INTERNAL, "engine step failed: device on fire")]
    driver.open("good", PROMPT)
    driver.run()
    assert driver.log("good") == expected_log(PROMPT, 8)
    for request_id in ("bad", "good"):
        driver.close(request_id)
    driver.assert_idle()


def test_a_block_for_a_request_that_is_gone_is_refused() -> None:
    sender = transferred(PROMPT)
    receiver = ExecutorDriver(FakeEngine())
    receiver.open("r", PROMPT, transfer=True)
    receiver.close("r")
    with pytest.raises(LookupError, match="awaits no KV"):
        receiver.place("r", sender.of("p", m.KVRead)[0].blocks)
    receiver.assert_idle()


def test_closing_in_every_state_returns_all_pages() -> None:
    def states() -> list[tuple[str, int]]:
        return [("waiting", 0), ("reserved", 0), ("prefilling", 1), ("decoding", 4), ("finished", 50)]

    for state, steps in states():
        driver = ExecutorDriver(FakeEngine(num_pages=5, max_step_tokens=8))
        if state == "waiting":
            driver.open("blocker", [5, *PROMPT], decode=False)
        driver.open("r", PROMPT)
        for _ in range(steps):
            driver.step()
        driver.close("r")
        driver.close("r")
        driver.run()
        driver.close("blocker")
        driver.assert_idle()
