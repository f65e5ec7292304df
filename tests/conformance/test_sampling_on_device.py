"""Both engines with tokens drawn on their devices, which are CPUs here: the tokens of engines that leave it to the host, whatever rows
stand beside each other, ahead of the host or in step with it, before a handoff and after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pddbridge.engine import Engine, RunsAhead, SampleRow, Step, StepUnderWay
from pddbridge.kv_spec import TokenRange
from pddbridge.sampling_params import SamplingParams
from tests.support.engines import MODULES, Row, make_engine, prefill, random_ids, step_of
from tests.support.tiny_models import make_tiny_llama

OTHER = {"jax": "torch", "torch": "jax"}
SAMPLED = SamplingParams(seed=11, max_tokens=64)
MIXED = (
    replace(SAMPLED, temperature=0.0),
    replace(SAMPLED, temperature=0.7, top_p=0.9),
    replace(SAMPLED, top_k=40, min_p=0.02, temperature=1.3),
    replace(SAMPLED, repetition_penalty=1.2, num_logprobs=1),
)
DRAWN = (MIXED[1], MIXED[2], SAMPLED, MIXED[0])


@dataclass
class Request:
    prompt: np.ndarray
    pages: list[int]
    params: SamplingParams
    log: list[int] = field(default_factory=list)

    def row(self, kv_len: int) -> Row:
        tokens = np.array([*self.prompt.tolist(), *self.log], np.int32)
        return Row(tokens[kv_len:], kv_len, self.pages, True, self.params, self.prompt, np.array(self.log, np.int32))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "m", num_heads=4, num_kv_heads=2)


@cache
def engine_of(name: str, model_dir: Path) -> Engine:
    return make_engine(name, model_dir, sample_on_device=True, run_ahead=True, num_pages=60)


@contextmanager
def on_host(*engines: Engine) -> Iterator[None]:
    """With the choice taken back: what they compiled is used, their drawing is not."""
    with pytest.MonkeyPatch.context() as patch:
        for engine in engines:
            patch.setattr(engine, "_config", replace(engine.config, sample_on_device=False))
        yield


@pytest.fixture(params=sorted(MODULES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def requests_of(params: tuple[SamplingParams, ...]) -> list[Request]:
    """Prompts of four lengths, on scattered pages."""
    pages = np.random.default_rng(3).permutation(60).tolist()
    return [Request(random_ids(20 + i, 5 + 7 * i), pages[i * 7 : i * 7 + 7], row) for i, row in enumerate(params)]


def prefill_all(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        prefill(engine, request.prompt[:-1], request.pages)


def decode_all(engine: Engine, requests: list[Request], count: int) -> None:
    """``count`` tokens each; what of a log is not in KV yet is ingested with the first."""
    for turn in range(count):
        rows = [r.row(len(r.prompt) - 1 if turn == 0 else len(r.prompt) + len(r.log) - 1) for r in requests]
        for request, record in zip(requests, engine.step(step_of(*rows)).records, strict=True):
            request.log.append(record.token_id)


def chosen(engine: Engine) -> Counter[str]:
    return Counter(engine.stats().chosen)


def test_mixed_rows_get_the_hosts_tokens_on_both_sides_of_a_handoff(name: str, model_dir: Path) -> None:
    relay, main = engine_of(name, model_dir), engine_of(OTHER[name], model_dir)

    def relayed() -> list[list[int]]:
        requests = requests_of(MIXED)
        prefill_all(relay, requests)
        decode_all(relay, requests, 9)
        for request in requests:
            for block in relay.read_kv(np.array(request.pages, np.int32), TokenRange(0, len(request.prompt) - 1)):
                main.write_kv(np.array(request.pages, np.int32), block)
        decode_all(main, requests, 9)
        return [request.log for request in requests]

    before = [chosen(engine) for engine in (relay, main)]
    drawn = relayed()
    between = [chosen(engine) for engine in (relay, main)]
    with on_host(relay, main):
        assert relayed() == drawn
    for engine, first, second in zip((relay, main), before, between, strict=True):
        doubts = second["host_doubt"] - first["host_doubt"]
        assert second - first == Counter(argmax=9, drawn=18 - doubts, host_doubt=doubts, host_record=9)
        assert chosen(engine) - second == Counter(argmax=9, host_off=27)


def test_a_chain_of_drawn_steps_gives_the_tokens_of_one_after_the_other(name: str, model_dir: Path) -> None:
    engine = engine_of(name, model_dir)
    assert isinstance(engine, RunsAhead)
    requests = requests_of(DRAWN)
    prefill_all(engine, requests)
    with on_host(engine):
        decode_all(engine, requests, 6)
    again = requests_of(DRAWN)
    prefill_all(engine, again)
    step = step_of(*(request.row(len(request.prompt) - 1) for request in again))
    chain: list[StepUnderWay] = [engine.start_step(step)]
    for _ in range(5):
        assert chain[-1].feeds_next
        step = behind(step)
        chain.append(engine.start_step(step, chain[-1]))
    results = [under_way.result() for under_way in chain]
    assert not any(result.misfed for result in results)
    compilations = engine.stats().compilations
    decode_all(engine, requests_of(DRAWN[::-1]), 1)
    assert engine.stats().compilations == compilations, "other parameters, the same program"
    assert [[result.records[i].token_id for result in results] for i in range(4)] == [request.log for request in requests]


def behind(step: Step) -> Step:
    """The step after ``step``, whose tokens nobody knows."""
    samples = tuple(SampleRow(s.row, s.position + 1, s.params, s.prompt_ids, np.zeros(s.position, np.int32)) for s in step.samples)
    unknown, starts = np.zeros(len(samples), np.int32), np.arange(len(samples) + 1, dtype=np.int32)
    return replace(step, token_ids=unknown, row_starts=starts, context_lens=step.context_lens + np.diff(step.row_starts), samples=samples)


def test_rows_in_doubt_are_drawn_by_the_host_and_counted(name: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that may be wrong by a third is never sure of a flat row; also where the step before is not known to the host."""
    engine = engine_of(name, model_dir)
    assert isinstance(engine, RunsAhead)
    requests = requests_of((SAMPLED,) * 4)
    prefill_all(engine, requests)
    with on_host(engine):
        decode_all(engine, requests, 2)
    monkeypatch.setattr(engine, "_draw_error", 0.3)
    again, before = requests_of((SAMPLED,) * 4), chosen(engine)
    prefill_all(engine, again)
    step = step_of(*(request.row(len(request.prompt) - 1) for request in again))
    first = engine.start_step(step)
    second = engine.start_step(behind(step), first)
    got = [[record.token_id for record in under_way.result().records] for under_way in (first, second)]
    assert got == [[request.log[turn] for request in requests] for turn in range(2)]
    assert chosen(engine)["host_doubt"] == before["host_doubt"] + 8
