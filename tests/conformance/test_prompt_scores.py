"""Log-probabilities of prompt tokens, as both engines compute them beside prefill, against transformers in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pddbridge.engine import MAX_SCORE_LOGPROBS, MAX_SCORED_TOKENS, Engine, ScoreRow
from pddbridge.sampling_params import TokenRecord
from tests.support import oracle
from tests.support.engines import MODULES, Row, make_engine, random_ids, step_of
from tests.support.tiny_models import make_tiny_llama

CLOSE = 1e-4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("scored"), num_heads=6, num_kv_heads=3, head_dim=16, hidden=48, max_context=256)


@pytest.fixture(scope="module", params=sorted(MODULES))
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Engine:
    return make_engine(request.param, model_dir, max_step_tokens=80)


def check(records: tuple[TokenRecord, ...], logits: np.ndarray, follows: np.ndarray, count: int) -> None:
    """``logits`` [n, vocab] of the scored tokens."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    logprobs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    assert [r.token_id for r in records] == follows.tolist()
    for row, record in zip(logprobs, records, strict=True):
        assert record.logprob == pytest.approx(row[record.token_id], abs=CLOSE)
        assert [value for _, value in record.top_logprobs] == pytest.approx(np.sort(row)[::-1][:count].tolist(), abs=CLOSE)
        assert all(row[token_id] == pytest.approx(value, abs=CLOSE) for token_id, value in record.top_logprobs)
        assert len({token_id for token_id, _ in record.top_logprobs}) == count


@pytest.mark.parametrize("chunks", [(37,), (1, 30, 6), (1, 1, 35)])
def test_every_position_of_a_prompt_in_chunks(engine: Engine, model_dir: Path, chunks: tuple[int, ...]) -> None:
    ids = random_ids(3, 38)
    records: list[TokenRecord] = []
    done = 0
    for size in chunks:
        step = step_of(Row(ids[done : done + size], done, [5, 2, 7, 30, 1]))
        step = replace(step, samples=(), scores=(ScoreRow(0, ids[done + 1 : done + size + 1], 4),))
        result = engine.step(step)
        assert result.records == ()
        records += result.scores[0]
        done += size
    check(tuple(records), oracle.logits(model_dir, ids.tolist())[:37], ids[1:], 4)


def test_rows_are_scored_beside_rows_that_sample(engine: Engine, model_dir: Path) -> None:
    prompts = [random_ids(seed, length) for seed, length in ((4, 19), (5, 12), (6, 24))]
    pages = [[1, 2, 3], [4, 5], [6, 7, 8]]
    step = step_of(*(Row(ids, 0, table) for ids, table in zip(prompts, pages, strict=True)))
    sampled = engine.step(step).records
    scores = (ScoreRow(2, prompts[2][1:], 0), ScoreRow(0, prompts[0][1:8], MAX_SCORE_LOGPROBS))
    result = engine.step(replace(step, scores=scores))
    assert result.records == sampled
    check(result.scores[0], oracle.logits(model_dir, prompts[2].tolist())[:-1], prompts[2][1:], 0)
    check(result.scores[1], oracle.logits(model_dir, prompts[0].tolist())[:7], prompts[0][1:8], MAX_SCORE_LOGPROBS)


def test_what_breaks_the_contract_is_refused_by_name(engine: Engine) -> None:
    ids = random_ids(7, 70)
    step = replace(step_of(Row(ids, 0, list(range(1, 10)))), samples=())
    for score, match in (
        (ScoreRow(1, ids[1:3], 0), "scores: given rows"),
        (ScoreRow(0, ids[:0], 0), "0 next_ids"),
        (ScoreRow(0, ids[1:3].astype(np.int64), 0), "int32"),
        (ScoreRow(0, np.array([300], np.int32), 0), "given id 300"),
        (ScoreRow(0, ids[1:3], MAX_SCORE_LOGPROBS + 1), "num_logprobs"),
        (ScoreRow(0, ids[: MAX_SCORED_TOKENS + 1], 0), "allowed up to 64"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.step(replace(step, scores=(score,)))
