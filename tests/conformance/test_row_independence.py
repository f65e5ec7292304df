"""A row's tokens depend on nothing but its own request: not on how many rows run beside it, nor on whether tokens came one at a time or
many at once, nor on which engine computed the KV before it. float32 engines promise equal tokens; bfloat16 engines may differ where the
oracle's best two logits all but tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pddbridge.engine import Engine
from pddbridge.kv_spec import TokenRange
from tests.support import oracle
from tests.support.engines import MODULES, Row, make_engine, prefill, random_ids, relative_error, step_of
from tests.support.tiny_models import make_tiny_llama

PAGE_SIZES = {"jax": 8, "torch": 12}
OTHER = {"jax": "torch", "torch": "jax"}
EXACT = 1e-5  # relative, float32 compute and KV
# Of the logits' spread: what bfloat16 arithmetic moves a logit of these models by, at most.
BFLOAT16_TIE = 0.05


@dataclass
class Request:
    """A prompt whose KV but for the last token's is in ``pages`` once it is prefilled, and the tokens decoded since."""

    prompt: np.ndarray
    pages: list[int]
    log: list[int] = field(default_factory=list)

    def row(self, kv_len: int) -> Row:
        tokens = np.array([*self.prompt.tolist(), *self.log], np.int32)
        return Row(tokens[kv_len:], kv_len, self.pages, prompt_ids=self.prompt, log_ids=np.array(self.log, np.int32))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    return make_tiny_llama(root / "m", num_heads=9, num_kv_heads=3, head_dim=16, hidden=72, num_layers=2, seed=3)


@cache
def engine_of(name: str, model_dir: Path, dtype: str = "float32", max_rows: int = 8, num_pages: int = 96) -> Engine:
    return make_engine(
        name,
        model_dir,
        compute_dtype=dtype,
        kv_dtype=dtype,
        page_size=PAGE_SIZES[name],
        max_rows=max_rows,
        max_step_tokens=max(64, max_rows),
        num_pages=num_pages,
    )


@pytest.fixture(params=sorted(MODULES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def requests_of(engine: Engine, prompts: Sequence[np.ndarray], num_tokens: int) -> list[Request]:
    """Requests with room for ``num_tokens`` more each, their pages scattered over the pool."""
    ids = iter(np.random.default_rng(5).permutation(engine.config.num_pages).tolist())
    return [Request(prompt, [next(ids) for _ in range(-(-(len(prompt) + num_tokens) // engine.config.page_size))]) for prompt in prompts]


def prefill_all(engine: Engine, requests: Sequence[Request]) -> None:
    """All prompts but for their last tokens, in one step."""
    rows = [Row(request.prompt[:-1], 0, request.pages, samples=False) for request in requests if len(request.prompt) > 1]
    engine.step(step_of(*rows))


def decode_all(engine: Engine, requests: Sequence[Request], count: int) -> None:
    """``count`` steps of one token per request."""
    for _ in range(count):
        step = step_of(*(request.row(len(request.prompt) + len(request.log) - 1) for request in requests))
        for request, record in zip(requests, engine.step(step).records, strict=True):
            request.log.append(record.token_id)


def beside_others(prompt: np.ndarray, num_rows: int) -> list[np.ndarray]:
    """``prompt`` in every other row; what is between is longer, shorter or one token."""
    return [prompt if row % 2 == 0 else random_ids(200 + row, (19, 1, 8)[row // 2 % 3]) for row in range(num_rows)]


@pytest.mark.parametrize("num_rows", [1, 2, 7, pytest.param(300, marks=pytest.mark.slow)])
def test_tokens_do_not_depend_on_the_number_of_rows(name: str, model_dir: Path, num_rows: int) -> None:
    engine = engine_of(name, model_dir) if num_rows <= 8 else engine_of(name, model_dir, max_rows=num_rows, num_pages=1800)
    prompt = random_ids(100, 13)
    want, _ = oracle.greedy(model_dir, prompt.tolist(), 24)
    requests = requests_of(engine, beside_others(prompt, num_rows), 24)
    for start in range(0, num_rows, 3):
        prefill_all(engine, requests[start : start + 3])
    decode_all(engine, requests, 24)
    for request in requests[::2]:
        assert request.log == want


@pytest.mark.parametrize("num_rows", [pytest.param(2, marks=pytest.mark.slow), 7])
def test_bfloat16_tokens_differ_only_at_near_ties(name: str, model_dir: Path, num_rows: int) -> None:
    """Against one row alone, up to the first difference, where the oracle must all but hesitate."""
    engine = engine_of(name, model_dir, "bfloat16")
    prompt = random_ids(101, 13)
    (alone,) = requests_of(engine, [prompt], 24)
    prefill_all(engine, [alone])
    decode_all(engine, [alone], 24)
    requests = requests_of(engine, beside_others(prompt, num_rows), 24)
    for start in range(0, num_rows, 3):
        prefill_all(engine, requests[start : start + 3])
    decode_all(engine, requests, 24)
    for request in requests[::2]:
        split = next((i for i, (got, want) in enumerate(zip(request.log, alone.log, strict=True)) if got != want), None)
        if split is not None:
            logits = oracle.logits(model_dir, [*prompt.tolist(), *alone.log[:split]])[-1]
            second, first = np.sort(logits)[-2:]
            assert first - second < BFLOAT16_TIE * np.ptp(logits)


def test_scoring_a_text_chooses_what_decoding_it_chose(name: str, model_dir: Path) -> None:
    """A chunk's argmax against that of decode steps, on both sides of where a chunk is cut and of a page's end."""
    engine = engine_of(name, model_dir)
    decoded, scored = requests_of(engine, [random_ids(102, 17)] * 2, 40)
    prefill_all(engine, [decoded])
    decode_all(engine, [decoded], 40)
    for count in (0, 1, 14, 15, 16, 31, 39):
        scored.log = decoded.log[:count]
        (record,) = engine.step(step_of(scored.row(0))).records
        assert record.token_id == decoded.log[count]


def test_replaying_tokens_at_once_leaves_the_kv_of_decoding_them(
    name: str, model_dir: Path, record_property: pytest.RecordProperty
) -> None:
    """25 tokens in one extend, as after a handoff, against one at a time; most are not what the model would choose, and they are obeyed."""
    engine = engine_of(name, model_dir)
    ids = random_ids(103, 58)
    stepwise, extended = requests_of(engine, [ids] * 2, 9)
    for request in (stepwise, extended):
        prefill(engine, ids[:33], request.pages)
    for position in range(33, 57):
        engine.step(step_of(Row(ids[position : position + 1], position, stepwise.pages, samples=False)))
    engine.step(step_of(Row(ids[33:57], 33, extended.pages, samples=False)))
    kv = [engine.read_kv(np.array(request.pages, np.int32), TokenRange(33, 57)) for request in (stepwise, extended)]
    error = max(relative_error(other.values, one.values) for one, other in zip(*kv, strict=True))
    record_property("kv_max_error", error)
    assert error < EXACT
    decode_all(engine, [stepwise], 9)
    decode_all(engine, [extended], 9)
    want, _ = oracle.greedy(model_dir, ids.tolist(), 9)
    assert stepwise.log == extended.log == want


def test_four_requests_relayed_on_one_engine_and_finished_on_the_other(name: str, model_dir: Path) -> None:
    """32 tokens each, of four lengths: prefilled together, 13 decoded together here, ingested in one step there, the rest decoded there."""
    relay, main = engine_of(name, model_dir), engine_of(OTHER[name], model_dir)
    prompts = [random_ids(104 + i, length) for i, length in enumerate((7, 16, 17, 25))]
    relayed, finished = requests_of(relay, prompts, 32), requests_of(main, prompts, 32)
    prefill_all(relay, relayed)
    decode_all(relay, relayed, 13)
    for source, target in zip(relayed, finished, strict=True):
        for block in relay.read_kv(np.array(source.pages, np.int32), TokenRange(0, len(source.prompt) - 1)):
            main.write_kv(np.array(target.pages, np.int32), block)
        target.log = list(source.log)
    ingest = step_of(*(request.row(len(request.prompt) - 1) for request in finished))
    for request, record in zip(finished, main.step(ingest).records, strict=True):
        request.log.append(record.token_id)
    decode_all(main, finished, 18)
    for request in finished:
        want, _ = oracle.greedy(model_dir, request.prompt.tolist(), 32)
        assert request.log == want
