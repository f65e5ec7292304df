"""The executor with the in-test engine: who gets pages and who waits, failures, and that every page comes back."""

from __future__ import annotations

import pytest

from pdd.errors import Code
from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pddbridge.engine import Step
from tests.support.executor_driver import PROMPT, ExecutorDriver, move, transferred
from tests.support.fake_engine import FakeEngine, expected_log


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
