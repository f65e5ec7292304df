"""Scoring a prompt on a worker: every position is told in order, computed even where it is cached, a bounded piece a step."""

from __future__ import annotations

from pdd.worker import messages as m
from pddbridge.engine import MAX_SCORED_TOKENS
from tests.support.executor_driver import ExecutorDriver
from tests.support.fake_engine import FakeEngine, expected_log

LONG = [(31 * i) % 250 + 9 for i in range(150)]


def told(driver: ExecutorDriver, name: str, prompt: list[int]) -> list[int]:
    """Ids in order of position, each told from where the last left off."""
    ids = [prompt[0]]
    for event in driver.of(name, m.PromptScores):
        assert event.position <= len(ids)
        ids += [record.token_id for record in event.records][len(ids) - event.position :]
        assert all(len(record.top_logprobs) == 2 for record in event.records)
    return ids


def engine() -> FakeEngine:
    return FakeEngine(num_pages=80, max_context=256, max_step_tokens=128)


def test_a_cached_prompt_is_computed_again_and_told_from_its_second_token_on() -> None:
    driver = ExecutorDriver(engine())
    driver.open("warm", LONG, max_tokens=2)
    driver.run()
    driver.close("warm")
    driver.open("scored", LONG, decode=False, prompt_logprobs=2)
    driver.run()
    assert driver.of("scored", m.Reserved)[0].hit_tokens == 0
    assert told(driver, "scored", LONG) == LONG
    kinds = driver.kinds("scored")
    assert kinds.index("Prefilled") > max(i for i, kind in enumerate(kinds) if kind == "PromptScores")
    driver.close("scored")
    driver.open("again", LONG, max_tokens=3)
    assert driver.of("again", m.Reserved)[0].hit_tokens >= 144
    driver.run()
    assert driver.log("again") == expected_log(LONG, 3)


def test_two_are_scored_one_after_the_other_beside_one_that_decodes() -> None:
    fake = engine()
    driver = ExecutorDriver(fake)
    driver.open("plain", LONG[:20], max_tokens=30)
    driver.open("a", LONG, decode=False, prompt_logprobs=2)
    driver.open("b", LONG[::-1], prompt_logprobs=2, max_tokens=3)
    driver.run()
    assert told(driver, "a", LONG) == LONG
    assert told(driver, "b", LONG[::-1]) == LONG[::-1]
    assert driver.log("b") == expected_log(LONG[::-1], 3)
    assert driver.log("plain") == expected_log(LONG[:20], 30)
    assert all(len(step.scores) <= 1 for step in fake.steps)
    assert max(sum(len(score.next_ids) for score in step.scores) for step in fake.steps) == MAX_SCORED_TOKENS


def test_a_preempted_one_tells_everything() -> None:
    driver = ExecutorDriver(FakeEngine(num_pages=9, page_size=4, max_step_tokens=5))
    driver.open("old", LONG[:10], max_tokens=18)
    driver.open("young", LONG[40:57], decode=False, prompt_logprobs=2)
    for _ in range(80):
        driver.step()
        if len(driver.log("old")) == 18:
            driver.close("old")
    assert driver.snapshot().preemptions >= 1
    assert told(driver, "young", LONG[40:57]) == LONG[40:57]
