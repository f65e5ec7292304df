"""Both engines, with steps started before the tokens of the step before are known: the same tokens and KV as one step after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pddbridge.engine import Engine, KVBlock, RunsAhead, SampleRow, Step, StepDone, StepResult, StepUnderWay
from pddbridge.kv_spec import HeadRange, LayerRange, TokenRange
from pddbridge.sampling_params import SamplingParams
from tests.support.engines import MODULES, Row, decode_greedy, make_engine, prefill, random_ids, step_of
from tests.support.tiny_models import make_tiny_llama

PAGES = ([7, 3, 11], [4, 20, 9], [30, 1, 22])
PROMPTS = tuple(random_ids(seed, count) for seed, count in ((1, 9), (2, 14), (3, 5)))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "m", num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module", params=sorted(MODULES))
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Engine:
    return make_engine(str(request.param), model_dir, run_ahead=True)


def first_step(engine: Engine, num_rows: int) -> Step:
    """The last prompt token of each row, whose KV before is in its pages."""
    for ids, pages in zip(PROMPTS[:num_rows], PAGES, strict=False):
        prefill(engine, ids[:-1], pages)
    return step_of(*(Row(ids[-1:], len(ids) - 1, pages, samples=True) for ids, pages in zip(PROMPTS[:num_rows], PAGES, strict=False)))


def behind(step: Step, token: int = 0) -> Step:
    """The step after ``step``, with ``token`` where it is not known."""
    samples = tuple(SampleRow(s.row, s.position + 1, s.params, s.prompt_ids, np.zeros(s.position, np.int32)) for s in step.samples)
    return replace(step, token_ids=np.full_like(step.token_ids, token), context_lens=step.context_lens + 1, samples=samples)


def kv_bits(engine: Engine, pages: list[int], length: int) -> bytes:
    return b"".join(block.values.tobytes() for block in engine.read_kv(np.array(pages, np.int32), TokenRange(0, length)))


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_chain_of_steps_gives_the_tokens_of_one_after_the_other(engine: Engine, num_rows: int) -> None:
    assert isinstance(engine, RunsAhead)
    step = first_step(engine, num_rows)
    chain: list[StepUnderWay] = [engine.start_step(step)]
    for turn in range(5):
        assert chain[-1].feeds_next
        step = behind(step, token=turn)
        chain.append(engine.start_step(step, chain[-1]))
    got = [[record.token_id for record in under_way.result().records] for under_way in chain]
    ahead_kv = [kv_bits(engine, pages, len(ids) + 5) for ids, pages in zip(PROMPTS[:num_rows], PAGES, strict=False)]
    for row, (ids, pages) in enumerate(zip(PROMPTS[:num_rows], PAGES, strict=False)):
        prefill(engine, ids[:-1], pages)
        wanted = decode_greedy(engine, ids, pages, 6)
        assert [tokens[row] for tokens in got] == wanted
        if num_rows == 1:  # products of other heights add in other orders
            assert ahead_kv[row] == kv_bits(engine, pages, len(ids) + 5)


def test_what_is_read_and_written_between_takes_effect_in_order(engine: Engine) -> None:
    """A page is read, overwritten and read again while steps are under way that read and write another."""
    assert isinstance(engine, RunsAhead)
    step = first_step(engine, 1)
    kv = engine.kv_spec
    plane, tokens, elsewhere = kv.groups[0].planes[0], TokenRange(0, 8), np.array([33], np.int32)
    first = engine.start_step(step)
    values = np.random.default_rng(4).random((kv.num_layers, 8, plane.num_heads, plane.head_dim), np.float32)
    engine.write_kv(elsewhere, KVBlock("k", LayerRange(0, kv.num_layers), tokens, HeadRange(0, plane.num_heads), values))
    second = engine.start_step(behind(step), first)
    assert engine.read_kv(elsewhere, tokens)[0].values.tobytes() == values.tobytes()
    tokens_got = [first.result().records[0].token_id, second.result().records[0].token_id]
    prefill(engine, PROMPTS[0][:-1], PAGES[0])
    assert tokens_got == decode_greedy(engine, PROMPTS[0], PAGES[0], 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("sampled", "needs the host"),
        ("rows", "other rows"),
        ("stranger", "another step|feeds_next"),
        ("not fed", "feeds_next"),
        ("known log", "log_ids; must be equal"),
    ],
)
def test_a_step_that_cannot_follow_is_refused(engine: Engine, change: str, why: str) -> None:
    assert isinstance(engine, RunsAhead)
    step = first_step(engine, 2)
    after: StepUnderWay = engine.start_step(step)
    next_step = behind(step)
    if change == "sampled":
        drawn = SamplingParams(seed=1, max_tokens=9)
        next_step = replace(next_step, samples=tuple(replace(sample, params=drawn) for sample in next_step.samples))
    elif change == "rows":
        next_step = behind(first_step(engine, 1))
    elif change == "stranger":
        after = StepDone(StepResult(()), feeds_next=True)
    elif change == "not fed":
        drawn_step = replace(step, samples=tuple(replace(s, params=SamplingParams(seed=1, max_tokens=9)) for s in step.samples))
        after = engine.start_step(drawn_step)
    else:
        samples = tuple(replace(sample, log_ids=np.zeros(sample.position, np.int32)) for sample in next_step.samples)
        next_step = replace(next_step, samples=samples)
    with pytest.raises(ValueError, match=why):
        engine.start_step(next_step, after)


def test_an_engine_that_is_not_to_run_ahead_says_so(model_dir: Path) -> None:
    for name in MODULES:
        plain = make_engine(name, model_dir)
        assert isinstance(plain, RunsAhead)
        assert not plain.start_step(first_step(plain, 1)).feeds_next


def test_an_argmax_of_nothing_finite_is_an_error_and_the_step_behind_reads_no_foreign_memory(engine: Engine) -> None:
    assert isinstance(engine, RunsAhead)
    step = first_step(engine, 1)
    kv = engine.kv_spec
    plane, tokens = kv.groups[0].planes[0], TokenRange(0, 1)
    nothing = np.full((kv.num_layers, 1, plane.num_heads, plane.head_dim), np.nan, np.float32)
    engine.write_kv(
        np.array(PAGES[0], np.int32), KVBlock("v", LayerRange(0, kv.num_layers), tokens, HeadRange(0, plane.num_heads), nothing)
    )
    first = engine.start_step(step)
    second = engine.start_step(behind(step), first)
    for under_way in (first, second):
        with pytest.raises(ValueError, match="finite"):
            under_way.result()
