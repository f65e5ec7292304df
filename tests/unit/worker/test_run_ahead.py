"""Steps that are started before the tokens of the step before are known: the same tokens, the same pages, whatever comes in between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pdd.errors import Code
from pdd.worker import messages as m
from pddbridge.engine import Step
from pddbridge.sampling_params import SamplingParams
from tests.support.executor_driver import ExecutorDriver
from tests.support.fake_engine import FakeEngine, expected_log

PROMPT = list(range(40, 63))


def greedy(max_tokens: int = 12, stops: Sequence[int] = (), **fields: object) -> SamplingParams:
    return SamplingParams(seed=1, temperature=0.0, max_tokens=max_tokens, stop_token_ids=frozenset(stops), **fields)  # type: ignore[arg-type]


def driver_of(**sizes: int) -> ExecutorDriver:
    return ExecutorDriver(FakeEngine(run_ahead=True, **sizes))  # type: ignore[arg-type]


def counts(driver: ExecutorDriver) -> tuple[int, int, int]:
    counters = driver.snapshot().counters
    return counters.steps, counters.steps_ahead, counters.rows_void


def test_decoding_runs_ahead_and_starts_no_step_too_many() -> None:
    driver = driver_of()
    for name, length in (("a", 20), ("b", 20)):
        driver.open(name, PROMPT[: 5 if name == "a" else 7], params=greedy(length))
    driver.run()
    for name in ("a", "b"):
        assert driver.log(name) == expected_log(PROMPT[: 5 if name == "a" else 7], 20)
    steps, ahead, void = counts(driver)
    assert (steps, ahead, void) == (1 + 19, 19, 0), "12 prompt tokens in one step, which samples; all others follow on it"


def test_tokens_are_told_before_the_step_behind_is_waited_for() -> None:
    driver = driver_of()
    driver.open("r", PROMPT[:4], params=greedy(9))
    for told in range(1, 4):
        driver.step()
        assert driver.log("r") == expected_log(PROMPT[:4], told)
        assert len(driver.engine.steps) == told + 1  # type: ignore[attr-defined]


def test_a_stop_token_leaves_a_row_that_nobody_hears_of() -> None:
    log = expected_log(PROMPT, 12)
    stop = next(i for i in range(3, 12) if log[i] not in log[:i])
    driver = driver_of(num_pages=8)
    driver.open("r", PROMPT, params=greedy(12, [log[stop]]))
    driver.open("other", PROMPT[:3], params=greedy(12))
    driver.run()
    assert driver.log("r") == log[: stop + 1]
    assert driver.log("other") == expected_log(PROMPT[:3], 12)
    assert counts(driver)[2] == 1
    for name in ("r", "other"):
        driver.close(name)
    driver.assert_idle()
    driver.open("again", [*PROMPT, *log[: stop + 1], 7], params=greedy(5))
    driver.run()
    assert driver.log("again") == expected_log([*PROMPT, *log[: stop + 1], 7], 5), "the cache holds nothing of the row too many"


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"repetition_penalty": 1.1}, {"num_logprobs": 2}, {"logit_bias": ((1, 2.0),)}])
def test_what_the_host_must_choose_is_waited_for(fields: dict[str, object]) -> None:
    driver = driver_of()
    driver.open("r", PROMPT[:4], params=SamplingParams(**{"seed": 1, "temperature": 0.0, "max_tokens": 9, **fields}))  # type: ignore[arg-type]
    driver.open("plain", PROMPT[:5], params=greedy(9))
    driver.run()
    assert driver.log("r") == expected_log(PROMPT[:4], 9)
    assert counts(driver)[1] == 0


def test_nobody_runs_ahead_of_a_prompt_or_of_one_that_waits_for_pages() -> None:
    driver = driver_of(num_pages=5, max_step_tokens=4)
    driver.open("r", PROMPT[:4], params=greedy(20))
    driver.step()
    driver.open("chunks", PROMPT[:15], params=greedy(1))
    driver.open("waits", PROMPT[:16], params=greedy(1))
    ahead = counts(driver)[1]
    while not driver.of("chunks", m.Prefilled):
        driver.step()
        assert counts(driver)[1] == ahead
    assert not driver.of("waits", m.Reserved)
    driver.step()
    assert counts(driver)[1] == ahead
    driver.close("chunks")
    driver.run()
    assert driver.log("waits") == expected_log(PROMPT[:16], 1)
    assert driver.log("r") == expected_log(PROMPT[:4], 20)


def test_limits_are_met_exactly() -> None:
    driver = driver_of(max_context=20)
    driver.open("limit", PROMPT[:4], params=greedy(30), limit=3)
    driver.open("context", PROMPT[:10], params=greedy(10))
    driver.run()
    assert driver.log("limit") == expected_log(PROMPT[:4], 3)
    assert driver.of("limit", m.Sealed) == [m.Sealed(3)]
    assert driver.log("context") == expected_log(PROMPT[:10], 10)
    assert counts(driver)[2] == 0, "what is known to end is not started"


def test_a_seal_counts_the_token_under_way_and_an_ingest_rewinds_it() -> None:
    driver = driver_of()
    driver.open("r", PROMPT[:4], params=greedy(30))
    for _ in range(3):
        driver.step()
    driver.seal("r")
    log = driver.log("r")
    assert driver.of("r", m.Sealed) == [m.Sealed(len(log))] == [m.Sealed(4)]
    assert log == expected_log(PROMPT[:4], 4)
    driver.ingest("r", 0, [*log[:2], 299], decode=True)
    driver.run()
    rest = [event.records[0].token_id for event in driver.of("r", m.Tokens)[4:]]
    assert [*log[:2], 299, *rest] == [*log[:2], 299, *expected_after([*PROMPT[:4], *log[:2], 299], 3, 30)]


def expected_after(tokens: list[int], position: int, length: int) -> list[int]:
    from tests.support.fake_engine import expected_token

    ids: list[int] = []
    while position + len(ids) < length:
        ids.append(expected_token([*tokens, *ids], position + len(ids)))
    return ids


def test_a_deadline_while_a_step_is_under_way_ends_that_request_alone() -> None:
    driver = driver_of()
    driver.open("late", PROMPT[:4], params=greedy(20), deadline=5.0)
    driver.open("r", PROMPT[:5], params=greedy(20))
    driver.step()
    driver.step()
    driver.executor.expire(6.0)
    driver.run()
    assert driver.of("late", m.Failed)[0].code is Code.DEADLINE_EXCEEDED
    assert driver.log("late") == expected_log(PROMPT[:4], 2)
    assert driver.log("r") == expected_log(PROMPT[:5], 20)
    for name in ("late", "r"):
        driver.close(name)
    driver.assert_idle()


@pytest.mark.parametrize("where", ["start", "result"])
def test_a_step_that_fails_ends_its_requests_once_and_the_worker_goes_on(where: str) -> None:
    broken = False

    def before(step: Step) -> None:
        if broken and where == "start":
            raise RuntimeError("the device is gone")

    engine = FakeEngine(run_ahead=True, before_step=before)
    driver = ExecutorDriver(engine)
    driver.open("r", PROMPT[:4], params=greedy(20))
    driver.step()
    driver.step()
    broken = engine.result_fails = True
    engine.result_fails = where == "result"
    driver.run()
    assert len(driver.of("r", m.Failed)) == 1
    broken = engine.result_fails = False
    driver.close("r")
    driver.open("next", PROMPT[:4], params=greedy(5))
    driver.run()
    assert driver.log("next") == expected_log(PROMPT[:4], 5)
    driver.close("next")
    driver.assert_idle()


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_gives_the_tokens_of_each_request_alone(seed: int) -> None:
    """Opens, closes, seals, late deadlines and too few pages at any moment, stop tokens that nobody foresees."""
    rng = random.Random(seed)
    engine = FakeEngine(run_ahead=True, page_size=3, num_pages=14, max_context=36, max_step_tokens=6, max_rows=3)
    driver, wanted, open_now, sealed = ExecutorDriver(engine), {}, [], set[str]()
    for number in range(rng.randint(6, 14)):
        for _ in range(rng.randint(0, 6)):
            driver.step()
        if open_now and rng.random() < 0.2:
            driver.seal(name := rng.choice(open_now))
            sealed.add(name)
        if open_now and rng.random() < 0.3:
            name = open_now.pop(rng.randrange(len(open_now)))
            driver.close(name)
            sealed.add(name)
        if len(open_now) < 5:
            name, prompt, length = f"r{number}", [rng.randrange(3) for _ in range(rng.randint(1, 16))], rng.randint(1, 18)
            full = expected_log(prompt, length)
            stops = rng.sample(full, min(2, length)) if rng.random() < 0.5 else []
            end = next((i + 1 for i, token_id in enumerate(full) if token_id in stops), length)
            wanted[name] = full[:end]
            open_now.append(name)
            driver.open(name, prompt, params=greedy(length, stops))
    while open_now:
        driver.run(2000)
        over = [name for name in open_now if name in sealed or driver.log(name) == wanted[name]]
        assert over, [(name, driver.log(name), wanted[name]) for name in open_now]
        for name in over:
            driver.close(name)
            open_now.remove(name)
    for name, log in wanted.items():
        assert driver.log(name) == (log[: len(driver.log(name))] if name in sealed else log), name
    driver.assert_idle()


def drawn(max_tokens: int, stops: Sequence[int] = ()) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=max_tokens, stop_token_ids=frozenset(stops))


def test_drawn_tokens_are_run_ahead_of_and_one_that_is_not_confirmed_is_computed_again() -> None:
    """Every fourth position is fed wrong: its row is void, the request goes on with the right token, neighbours do not notice."""
    driver = ExecutorDriver(FakeEngine(run_ahead=True, sample_on_device=True, misfeeds=lambda position: position % 4 == 1))
    driver.open("drawn", PROMPT[:5], params=drawn(20))
    driver.open("greedy", PROMPT[:7], params=greedy(20))
    driver.run()
    assert driver.log("drawn") == expected_log(PROMPT[:5], 20)
    assert driver.log("greedy") == expected_log(PROMPT[:7], 20)
    _, ahead, void = counts(driver)
    assert void == 5, "positions 1, 5, 9, 13 and 17"
    assert ahead > 10
    for name in ("drawn", "greedy"):
        driver.close(name)
    driver.assert_idle()
    driver.open("again", [*PROMPT[:5], *expected_log(PROMPT[:5], 20), 7], params=greedy(5))
    driver.run()
    assert driver.log("again") == expected_log([*PROMPT[:5], *expected_log(PROMPT[:5], 20), 7], 5), (
        "the cache holds nothing that was fed wrong"
    )


@pytest.mark.parametrize("seed", range(20))
def test_wrong_feeds_at_any_moment_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(
        run_ahead=True,
        sample_on_device=True,
        misfeeds=lambda _: rng.random() < 0.3,
        page_size=3,
        num_pages=14,
        max_step_tokens=6,
        max_rows=3,
    )
    driver, wanted = ExecutorDriver(engine), {}
    for number in range(6):
        for _ in range(rng.randint(0, 6)):
            driver.step()
        prompt, length = [rng.randrange(3) for _ in range(rng.randint(1, 12))], rng.randint(1, 18)
        full = expected_log(prompt, length)
        stops = [rng.choice(full)] if rng.random() < 0.5 else []
        wanted[f"r{number}"] = full[: next((i + 1 for i, token_id in enumerate(full) if token_id in stops), length)]
        driver.open(f"r{number}", prompt, params=drawn(length, stops))
        if number >= 2:
            driver.run(2000)
            for name in [name for name in wanted if driver.log(name) == wanted[name]]:
                driver.close(name)
    driver.run(2000)
    for name, log in wanted.items():
        assert driver.log(name) == log
        driver.close(name)
    driver.assert_idle()


def test_the_random_orders_do_run_ahead_and_do_drop_rows() -> None:
    driver = driver_of(page_size=3, num_pages=30)
    void = 0
    for number in range(20):
        log = expected_log([number], 12)
        driver.open(f"r{number}", [number], params=greedy(12, [log[5]]))
        driver.run()
        driver.close(f"r{number}")
        void = counts(driver)[2]
    assert void > 10
