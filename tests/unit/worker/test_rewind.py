"""A request that proposed tokens which another worker was first with: it is rewound to the log and goes on as if it had never strayed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdd.errors import Code
from pdd.worker import messages as m
from pddbridge.sampling_params import SamplingParams
from tests.support.engines import make_engine
from tests.support.executor_driver import ExecutorDriver
from tests.support.fake_engine import VOCAB, FakeEngine, expected_log, expected_token
from tests.support.tiny_models import make_tiny_llama

PROMPT = [(7 * i) % 290 + 5 for i in range(13)]


def proposals(driver: ExecutorDriver, request_id: str = "r") -> dict[int, int]:
    """The last token proposed for each position."""
    return {e.position + n: record.token_id for e in driver.of(request_id, m.Tokens) for n, record in enumerate(e.records)}


def continued(prompt: Sequence[int], log: Sequence[int], length: int) -> list[int]:
    ids = list(log)
    while len(ids) < length:
        ids.append(expected_token([*prompt, *ids], len(ids)))
    return ids


def decode_until(driver: ExecutorDriver, count: int, request_id: str = "r") -> list[int]:
    while len(proposals(driver, request_id)) < count:
        assert driver.step()
    return [proposals(driver, request_id)[p] for p in range(count)]


@pytest.mark.parametrize("page_size", [4, 5, 8])
@pytest.mark.parametrize("cut", [0, 2, 3, 6])
@pytest.mark.parametrize("num_given", [1, 4, 9])
def test_after_a_rewind_the_tokens_are_those_of_a_fresh_run(page_size: int, cut: int, num_given: int) -> None:
    driver = ExecutorDriver(FakeEngine(page_size=page_size, num_pages=20))
    driver.open("r", PROMPT, max_tokens=20)
    strayed = decode_until(driver, 7)
    log = continued(PROMPT, [*strayed[:cut], (strayed[cut] + 1) % VOCAB], cut + num_given)
    driver.ingest("r", 0, log, decode=True)
    driver.executor.check()
    driver.run()
    want = continued(PROMPT, log, 20)
    got = proposals(driver)
    assert [got[p] for p in range(len(log), 20)] == want[len(log) :]
    assert driver.of("r", m.Ingested) == [m.Ingested(len(log))]
    kinds = driver.kinds("r")
    assert kinds.index("Ingested") < len(kinds) - 1 - kinds[::-1].index("Tokens"), "told before the first token that counts on it"
    driver.close("r")
    driver.assert_idle()


def test_tokens_that_are_equal_change_nothing() -> None:
    """Given what it proposed itself, one by one and behind its own end, a request proposes on; each answer names what was given."""
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, max_tokens=12)
    own = decode_until(driver, 5)
    for position in range(5):
        driver.ingest("r", position, [own[position]], decode=True)
    assert driver.of("r", m.Ingested) == [m.Ingested(n) for n in range(1, 6)]
    log = expected_log(PROMPT, 12)
    driver.ingest("r", 3, log[3:9], decode=True)
    driver.run()
    assert [proposals(driver)[p] for p in (0, 1, 2, 3, 4, 9, 10, 11)] == [*log[:5], *log[9:]]
    assert not {5, 6, 7, 8} & set(proposals(driver)), "what was given is not sampled"


def test_what_was_given_is_final() -> None:
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, log=[11, 12], max_tokens=12)
    while len(proposals(driver)) < 3:
        assert driver.step()
    driver.ingest("r", 2, [proposals(driver)[2]], decode=True)
    driver.ingest("r", 2, [(proposals(driver)[2] + 1) % VOCAB], decode=True)
    (failed,) = driver.of("r", m.Failed)
    assert failed.code is Code.INVALID_ARGUMENT
    assert "position 2 holds token" in failed.message


def test_a_request_that_ended_itself_goes_on_when_its_end_did_not_count() -> None:
    own = expected_log(PROMPT, 6)
    stop = next(p for p in range(1, 6) if own[p] not in own[:p])
    params = SamplingParams(seed=1, max_tokens=12, stop_token_ids=frozenset({own[stop]}))
    driver = ExecutorDriver(FakeEngine())
    driver.open("r", PROMPT, params=params)
    driver.run()
    assert max(proposals(driver)) == stop
    log = [*own[:stop], (own[stop] + 1) % VOCAB]
    driver.ingest("r", stop, log[stop:], decode=True)
    driver.run()
    assert [proposals(driver)[p] for p in range(stop + 1, 12)] == continued(PROMPT, log, 12)[stop + 1 :]


@pytest.mark.parametrize("cut", range(6))
def test_pages_that_the_cache_knows_are_not_written(cut: int) -> None:
    """After a preemption the request holds cached pages with tokens of its own: whoever hits them later must find those tokens' KV."""
    driver = ExecutorDriver(FakeEngine(page_size=4, num_pages=12))
    driver.open("old", list(range(20, 37)), max_tokens=30)
    driver.open("r", PROMPT, max_tokens=20)
    own = decode_until(driver, 7)
    while not driver.snapshot().preemptions:  # the older one grows into the younger one's pages
        assert driver.step()
        if len(proposals(driver)) > len(own):
            own = decode_until(driver, len(own) + 1)
    driver.close("old")
    driver.executor.admit_waiting()
    log = [*own[:cut], (own[cut] + 1) % VOCAB]
    driver.ingest("r", 0, log, decode=True)
    driver.run()
    assert [proposals(driver)[p] for p in range(cut + 1, 20)] == continued(PROMPT, log, 20)[cut + 1 :]
    driver.close("r")
    again = [*PROMPT, *own]
    driver.open("again", again, max_tokens=5)
    driver.run()
    assert driver.log("again") == expected_log(again, 5)
    driver.close("again")
    driver.assert_idle()


def test_a_request_without_pages_is_rewound_too() -> None:
    driver = ExecutorDriver(FakeEngine(page_size=4, num_pages=12))
    driver.open("old", list(range(20, 37)), max_tokens=30)
    driver.open("r", PROMPT, max_tokens=20)
    own = decode_until(driver, 7)
    while not driver.snapshot().preemptions:
        assert driver.step()
    log = [*own[:3], (own[3] + 1) % VOCAB]
    driver.ingest("r", 0, log, decode=True)
    driver.run()
    driver.close("old")
    driver.run()
    assert [proposals(driver)[p] for p in range(4, 20)] == continued(PROMPT, log, 20)[4:]
    driver.close("r")
    driver.assert_idle()


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.2, "repetition_penalty": 1.3}], ids=["greedy", "sampled"])
def test_real_engines_go_on_as_in_a_fresh_run(engine: str, params: dict[str, float], tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model", num_heads=6, num_kv_heads=3, num_layers=2, max_context=64)
    cache = Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pdd") / "compiled" / engine
    sizes = {"num_pages": 20, "max_context_tokens": 64, "max_step_tokens": 16, "max_rows": 2, "compile_cache_dir": str(cache)}
    driver = ExecutorDriver(make_engine(engine, model, **sizes), use_prefix_cache=False)
    sampling = SamplingParams(seed=9, max_tokens=16, ignore_eos=True, **params)  # type: ignore[arg-type]
    for cut in (0, 3, 5):
        driver.open("r", PROMPT, params=sampling)
        own = decode_until(driver, 6)
        log = [*own[:cut], (own[cut] + 1) % 290]
        driver.open("fresh", PROMPT, log=log, params=sampling)
        driver.ingest("r", 0, log, decode=True)
        driver.run()
        want = [proposals(driver, "fresh")[p] for p in range(cut + 1, 16)]
        assert [proposals(driver)[p] for p in range(cut + 1, 16)] == want
        for request_id in ("r", "fresh"):
            driver.close(request_id)
            driver.events.pop(request_id)
    driver.assert_idle()
