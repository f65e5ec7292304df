"""The executor with the in-test engine: what it computes, what it finds in its cache, and that every page comes back."""

from __future__ import annotations

import pytest

from pdd.worker import messages as m
from tests.support.executor_driver import PROMPT, ExecutorDriver, computed
from tests.support.fake_engine import FakeEngine, expected_log


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
