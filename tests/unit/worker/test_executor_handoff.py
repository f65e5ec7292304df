"""The executor with the in-test engine: tokens that are ingested, and how proposing ends."""

from __future__ import annotations

import pytest

from pdd.errors import Code
from pdd.worker import messages as m
from pddbridge.sampling_params import SamplingParams
from tests.support.executor_driver import PROMPT, ExecutorDriver, computed, move, transferred
from tests.support.fake_engine import FakeEngine, expected_log


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
