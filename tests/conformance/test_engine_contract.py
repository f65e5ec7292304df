"""What both engines owe by :mod:`pddbridge.engine`: one suite, run on each. The oracle is transformers in float32.

Sizes differ pairwise where mixing them up must show (9 and 3 heads, pages of 16 against 12) and agree where that is the trap
(page size 8 for cases that count slots).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np
import pytest

from pddbridge.engine import Engine, KVBlock, Step, start_read_kv
from pddbridge.kv_block import arrays_in, room_for
from pddbridge.kv_spec import KV_DTYPES, HeadRange, LayerRange, TokenRange
from pddbridge.sampling import sample
from pddbridge.sampling_params import SamplingParams
from pddkernels.jax_ops import JaxOps
from tests.support import oracle
from tests.support.engines import GREEDY, MODULES, Row, decode_greedy, make_engine, prefill, random_ids, relative_error, step_of
from tests.support.kv import bits
from tests.support.tiny_models import make_tiny_llama

EXACT = 1e-5  # relative, float32 compute and KV
OTHER = {"jax": "torch", "torch": "jax"}


@dataclass(frozen=True)
class Case:
    """A model and the page size that each engine keeps its KV in."""

    model_dir: Path
    page_sizes: dict[str, int]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("models")
    return {
        "4 heads, 2 kv": Case(make_tiny_llama(root / "a", num_heads=4, num_kv_heads=2), {"jax": 8, "torch": 8}),
        "9 heads, 3 kv": Case(
            make_tiny_llama(root / "b", num_heads=9, num_kv_heads=3, head_dim=16, hidden=72, tie=True, seed=1), {"jax": 16, "torch": 12}
        ),
        "one layer": Case(make_tiny_llama(root / "c", num_heads=6, num_kv_heads=2, num_layers=1), {"jax": 8, "torch": 5}),
    }


class Engines(Protocol):
    def __call__(self, name: str, case: str, kv_dtype: str = "float32") -> Engine: ...


@pytest.fixture(scope="session")
def engines(cases: dict[str, Case]) -> Engines:
    """Engines by name and case, made once: every test writes what it reads."""

    @cache
    def get(name: str, case: str, kv_dtype: str = "float32") -> Engine:
        return make_engine(name, cases[case].model_dir, page_size=cases[case].page_sizes[name], kv_dtype=kv_dtype)

    return get


@pytest.fixture(params=sorted(MODULES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["4 heads, 2 kv", "9 heads, 3 kv"])
def case_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model_dir(cases: dict[str, Case], case_name: str) -> Path:
    return cases[case_name].model_dir


@pytest.fixture
def engine(engines: Engines, name: str, case_name: str) -> Engine:
    return engines(name, case_name)


@pytest.fixture
def small(engines: Engines, name: str) -> Engine:
    """For what does not depend on the model: page size 8 on both engines."""
    return engines(name, "4 heads, 2 kv")


def pages_for(engine: Engine, num_tokens: int, turn: int = 0) -> list[int]:
    """Pages of a row, scattered over the pool; rows of different ``turn`` (0 to 2) share none."""
    scattered = np.random.default_rng(7).permutation(engine.config.num_pages)
    count = -(-num_tokens // engine.config.page_size)
    assert count <= len(scattered) // 3
    return [int(page) for page in scattered[turn::3][:count]]


def all_kv(engine: Engine) -> np.ndarray:
    """Every slot of the pool as bits: [planes, layers, slots, heads, dim bytes]."""
    table = np.arange(engine.config.num_pages, dtype=np.int32)
    blocks = engine.read_kv(table, TokenRange(0, engine.config.num_pages * engine.config.page_size))
    return np.stack([block.values.view(np.uint8) for block in blocks])


def table_of(pages: list[int]) -> np.ndarray:
    return np.array(pages, np.int32)


def fill(engine: Engine, pages: list[int], value: float) -> None:
    """Every slot of ``pages``, both planes."""
    kv = engine.kv_spec
    plane = kv.groups[0].planes[0]
    tokens = TokenRange(0, len(pages) * engine.config.page_size)
    values = np.full((kv.num_layers, len(tokens), plane.num_heads, plane.head_dim), value, kv.np_dtype)
    for name in ("k", "v"):
        block = KVBlock(name, LayerRange(0, kv.num_layers), tokens, HeadRange(0, plane.num_heads), values)
        engine.write_kv(table_of(pages), block)


# --- logits


def test_logits_equal_the_oracle_for_chunk_decode_and_extend(engine: Engine, model_dir: Path) -> None:
    ids = random_ids(0, 100)
    want = oracle.logits(model_dir, ids.tolist())
    pages = pages_for(engine, len(ids))
    start = 0
    for count in (37, 1, 1, 5, 1, 17, 38):
        got = engine.logits(step_of(Row(ids[start : start + count], start, pages)))
        start += count
        assert got.shape == (1, engine.spec.vocab_size)
        assert got.dtype == np.float32
        assert relative_error(got[0], want[start - 1]) < EXACT


@pytest.mark.parametrize("chunks", [(7, 13, 5, 3), (1, 31), (63,), (33, 16, 1)])
def test_odd_chunks_equal_one_chunk(engine: Engine, model_dir: Path, chunks: tuple[int, ...]) -> None:
    ids = random_ids(1, 64)
    whole, cut = pages_for(engine, 64, 0), pages_for(engine, 64, 1)
    prefill(engine, ids[:-1], whole)
    prefill(engine, ids[:-1], cut, chunks)
    tokens = TokenRange(0, 63)
    for one, other in zip(engine.read_kv(table_of(whole), tokens), engine.read_kv(table_of(cut), tokens), strict=True):
        assert relative_error(other.values, one.values) < EXACT
    got = engine.logits(step_of(Row(ids[-1:], 63, cut)))
    assert relative_error(got[0], oracle.logits(model_dir, ids.tolist())[-1]) < EXACT


@pytest.mark.parametrize("pages_and_rest", [(1, 0), (1, 1), (2, 0), (2, 1), (3, -1)])
def test_prompts_that_end_at_a_page_boundary(engine: Engine, model_dir: Path, pages_and_rest: tuple[int, int]) -> None:
    """P leaves the last prompt token to decode; with prompt % page 0 and 1 it is the last of a page, and the first of one."""
    num_pages, rest = pages_and_rest
    ids = random_ids(2, num_pages * engine.config.page_size + rest)
    pages = pages_for(engine, len(ids) + 6)
    prefill(engine, ids[:-1], pages)
    want, _ = oracle.greedy(model_dir, ids.tolist(), 6)
    assert decode_greedy(engine, ids, pages, 6) == want


def test_a_one_token_prompt_needs_no_prefill(engine: Engine, model_dir: Path) -> None:
    ids = random_ids(3, 1)
    want, _ = oracle.greedy(model_dir, ids.tolist(), 5)
    assert decode_greedy(engine, ids, pages_for(engine, 6), 5) == want


def test_mixed_rows_equal_each_row_alone_over_many_steps(engine: Engine, model_dir: Path) -> None:
    """A chunk, an extend and a decode row in one batch, then all three as decode rows: first steps alone prove nothing."""
    prompts = [random_ids(10, 49), random_ids(11, 30), random_ids(12, 18)]
    done = [0, 22, 17]  # the rest is 49, 8 and 1 new tokens
    alone = []
    for prompt in prompts:
        ids, _ = oracle.greedy(model_dir, prompt.tolist(), 12)
        alone.append(([*prompt.tolist(), *ids], ids))
    pages = [pages_for(engine, 61, turn) for turn in range(3)]
    for prompt, count, own in zip(prompts, done, pages, strict=True):
        prefill(engine, prompt[:count], own)

    logs: list[list[int]] = [[], [], []]
    for turn in range(12):
        rows = []
        for prompt, count, own, log in zip(prompts, done, pages, logs, strict=True):
            tokens = np.array([*prompt.tolist(), *log], np.int32)
            start = count if turn == 0 else len(tokens) - 1
            rows.append(Row(tokens[start:], start, own, prompt_ids=prompt, log_ids=np.array(log, np.int32)))
        step = step_of(*rows)
        logits = engine.logits(step)
        records = engine.step(step).records  # writes the same KV again
        for log, record, row_logits, (sequence, _) in zip(logs, records, logits, alone, strict=True):
            want = oracle.logits(model_dir, sequence[: len(sequence) - 12 + len(log)])[-1]
            assert relative_error(row_logits, want) < EXACT
            log.append(record.token_id)
    assert logs == [ids for _, ids in alone]


def test_an_extend_equals_stepwise_decode(engine: Engine) -> None:
    ids = random_ids(13, 58)
    stepwise, extended = pages_for(engine, 58, 0), pages_for(engine, 58, 1)
    for pages in (stepwise, extended):
        prefill(engine, ids[:33], pages)
    for position in range(33, 58):
        last = engine.logits(step_of(Row(ids[position : position + 1], position, stepwise)))
    at_once = engine.logits(step_of(Row(ids[33:], 33, extended)))
    assert relative_error(at_once, last) < EXACT
    tokens = TokenRange(33, 58)
    for one, other in zip(engine.read_kv(table_of(stepwise), tokens), engine.read_kv(table_of(extended), tokens), strict=True):
        assert relative_error(other.values, one.values) < EXACT


def test_rows_that_share_prefix_pages(engine: Engine, model_dir: Path) -> None:
    size = engine.config.page_size
    prefix = random_ids(14, 2 * size)
    shared = pages_for(engine, 2 * size, 0)
    prefill(engine, prefix, shared)
    prompts = [np.concatenate([prefix, random_ids(20 + i, 5 + i)]) for i in range(3)]
    own = pages_for(engine, 3 * size, 1)
    rows = [Row(prompt[2 * size :], 2 * size, [*shared, own[i]]) for i, prompt in enumerate(prompts)]
    for got, prompt in zip(engine.logits(step_of(*rows)), prompts, strict=True):
        assert relative_error(got, oracle.logits(model_dir, prompt.tolist())[-1]) < EXACT


def test_only_sampling_rows_have_logits_in_the_order_asked(engine: Engine, model_dir: Path) -> None:
    prompts = [random_ids(30, 9), random_ids(31, 21), random_ids(32, 4)]
    rows = [Row(prompt, 0, pages_for(engine, 21, turn)) for turn, prompt in enumerate(prompts)]
    step = step_of(*rows)
    step = replace(step, samples=(step.samples[2], step.samples[0]))
    got = engine.logits(step)
    assert got.shape == (2, engine.spec.vocab_size)
    for row, prompt in zip(got, (prompts[2], prompts[0]), strict=True):
        assert relative_error(row, oracle.logits(model_dir, prompt.tolist())[-1]) < EXACT
    assert engine.logits(replace(step, samples=())).shape == (0, engine.spec.vocab_size)
    assert engine.step(replace(step, samples=())).records == ()


def test_a_bfloat16_engine_stays_near_the_oracle(name: str, cases: dict[str, Case]) -> None:
    model_dir = cases["4 heads, 2 kv"].model_dir
    engine = make_engine(name, model_dir, compute_dtype="bfloat16", kv_dtype="bfloat16")
    ids = random_ids(33, 40)
    pages = pages_for(engine, 40)
    prefill(engine, ids[:-1], pages)
    got = engine.logits(step_of(Row(ids[-1:], 39, pages)))
    assert got.dtype == np.float32
    assert relative_error(got[0], oracle.logits(model_dir, ids.tolist())[-1]) < 0.1


def test_biases_shards_and_half_precision_weights(name: str, tmp_path: Path) -> None:
    model_dir = make_tiny_llama(tmp_path / "m", attention_bias=True, mlp_bias=True, form="sharded", dtype="bfloat16", num_layers=2)
    engine = make_engine(name, model_dir)
    ids = random_ids(34, 20)
    got = engine.logits(step_of(Row(ids, 0, pages_for(engine, 20))))
    assert relative_error(got[0], oracle.logits(model_dir, ids.tolist())[-1]) < EXACT


# --- unused slots


@pytest.mark.parametrize("rest", range(8))
def test_nan_in_unused_slots_does_not_leak(engine: Engine, model_dir: Path, rest: int) -> None:
    """KV of exactly r tokens arrives in pages full of NaN (page 8: r = 8k + j); computing goes on at r, by decode and by extend."""
    ids = random_ids(40, 60)
    arrived = 16 + rest
    source, pages, other = (pages_for(engine, 64, turn) for turn in range(3))
    prefill(engine, ids[:arrived], source)
    for poisoned in (pages, other):
        fill(engine, poisoned, np.nan)
        for block in engine.read_kv(table_of(source), TokenRange(0, arrived)):
            engine.write_kv(table_of(poisoned), block)
    want = oracle.logits(model_dir, ids.tolist())
    extended = engine.logits(step_of(Row(ids[arrived:], arrived, pages)))[0]
    assert relative_error(extended, want[-1]) < EXACT
    # One row decodes beside a longer one, so that its pass over the keys goes past its own.
    for position in range(arrived, arrived + 3):
        rows = (Row(ids[position : position + 1], position, other), Row(ids[-1:], 59, pages))
        got = engine.logits(step_of(*rows))
        assert relative_error(got[0], want[position]) < EXACT
        assert relative_error(got[1], want[-1]) < EXACT


def test_page_table_entries_past_the_row_are_never_used(small: Engine, cases: dict[str, Case]) -> None:
    """They are 0 by contract; page 0 full of NaN, or entries out of range, must change nothing."""
    ids = random_ids(41, 21)
    pages = [5, 9, 2]
    fill(small, [0], np.nan)
    want = oracle.logits(cases["4 heads, 2 kv"].model_dir, ids.tolist())[-1]
    for rest in ([0] * 10, [2**30, -5]):
        got = small.logits(step_of(Row(ids, 0, [*pages, *rest])))
        assert relative_error(got[0], want) < EXACT
    assert np.isnan(small.read_kv(table_of([0]), TokenRange(0, 8))[0].values).all()


# --- KV in and out


def test_kv_moves_to_the_other_engine_and_decode_goes_on(engines: Engines, name: str, case_name: str, model_dir: Path) -> None:
    """Both directions, through pools of different page size and layout: bits equal, tokens equal."""
    source, target = engines(name, case_name), engines(OTHER[name], case_name)
    ids = random_ids(50, 45)
    prefill(source, ids[:-1], pages_for(source, 45, 0), chunks=(20,))
    tokens = TokenRange(0, 44)
    sent = source.read_kv(table_of(pages_for(source, 45, 0)), tokens)
    pages = pages_for(target, 57, 1)
    fill(target, pages, np.nan)
    for block in sent:
        target.write_kv(table_of(pages), block)
    for block, back in zip(sent, target.read_kv(table_of(pages), tokens), strict=True):
        assert (block.plane, block.layers, block.tokens, block.heads) == (back.plane, back.layers, back.tokens, back.heads)
        assert back.values.dtype == block.values.dtype == target.kv_spec.np_dtype
        assert back.values.flags.c_contiguous
        assert np.array_equal(back.values.view(np.uint8), block.values.view(np.uint8))
    want, _ = oracle.greedy(model_dir, ids.tolist(), 12)
    assert decode_greedy(target, ids, pages, 12) == want


def test_write_kv_touches_nothing_outside_its_ranges(engine: Engine) -> None:
    kv = engine.kv_spec
    plane = kv.groups[0].planes[0]
    pages = pages_for(engine, 50)
    rng = np.random.default_rng(60)
    layers, tokens, heads = LayerRange(1, 3), TokenRange(5, 41), HeadRange(plane.num_heads - 1, plane.num_heads)
    for name, index in (("k", 0), ("v", 1)):
        before = all_kv(engine)
        values = rng.standard_normal((2, 36, 1, plane.head_dim)).astype(kv.np_dtype)
        engine.write_kv(table_of(pages), KVBlock(name, layers, tokens, heads, values))
        expected = before.copy()
        positions = np.arange(5, 41)
        slots = np.array(pages)[positions // engine.config.page_size] * engine.config.page_size + positions % engine.config.page_size
        expected[index, 1:3, slots, plane.num_heads - 1] = values.view(np.uint8)[:, :, 0].transpose(1, 0, 2)
        assert np.array_equal(all_kv(engine), expected)


def test_long_ranges_and_single_tokens_are_read_as_written(engine: Engine) -> None:
    """As long as a context may be, and one token in the middle of a page."""
    kv = engine.kv_spec
    plane = kv.groups[0].planes[0]
    table = table_of(
        [int(page) for page in np.random.default_rng(61).permutation(engine.config.num_pages)][: -(-160 // engine.config.page_size)]
    )
    values = np.random.default_rng(62).standard_normal((kv.num_layers, 160, plane.num_heads, plane.head_dim)).astype(kv.np_dtype)
    layers, heads = LayerRange(0, kv.num_layers), HeadRange(0, plane.num_heads)
    engine.write_kv(table, KVBlock("v", layers, TokenRange(0, 160), heads, values))
    engine.write_kv(table, KVBlock("k", layers, TokenRange(0, 160), heads, -values))
    for start, stop in ((0, 160), (83, 84), (3, 3), (150, 160)):
        k, v = engine.read_kv(table, TokenRange(start, stop))
        assert (k.plane, v.plane) == ("k", "v")
        assert np.array_equal(v.values, values[:, start:stop])
        assert np.array_equal(k.values, -values[:, start:stop])


@pytest.mark.parametrize("way", ["step", "write_kv", "copy_page"])
def test_kv_that_is_on_its_way_to_the_host_is_what_was_there_whatever_is_written_since(engine: Engine, way: str) -> None:
    pages, spare = pages_for(engine, 40), pages_for(engine, 40, 1)
    prefill(engine, random_ids(8, 40), pages)
    tokens = TokenRange(3, 38)
    want = engine.read_kv(table_of(pages), tokens)
    under_way = [start_read_kv(engine, table_of(pages), tokens)]
    if (pool := getattr(engine, "_pool", None)) is not None:  # what the engine does on a device, on this one
        under_way.append(pool.start_read(table_of(pages), tokens))
    match way:
        case "step":
            prefill(engine, random_ids(9, 40), pages)
        case "write_kv":
            fill(engine, pages, 0.25)
        case _:
            for source, destination in zip(spare, pages, strict=True):
                engine.copy_page(source, destination)
    assert not np.array_equal(bits(engine.read_kv(table_of(pages), tokens)[0].values), bits(want[0].values))
    for copy in under_way:
        for block, before in zip(copy.blocks(), want, strict=True):
            assert (block.plane, block.layers, block.tokens, block.heads) == (before.plane, before.layers, before.tokens, before.heads)
            assert np.array_equal(bits(block.values), bits(before.values))
    with pytest.raises(ValueError, match="page_table"):
        start_read_kv(engine, table_of(pages[:1]), tokens)


def test_kv_is_read_into_a_link_s_memory_in_one_pass(engine: Engine) -> None:
    pages = pages_for(engine, 40)
    prefill(engine, random_ids(8, 40), pages)
    table = table_of(pages)
    for tokens in (TokenRange(3, 38), TokenRange(16, 17), TokenRange(0, 40)):
        memory = np.full(room_for(engine.kv_spec, len(tokens)) + 64, 0xA5, np.uint8)
        out = arrays_in(memory, engine.kv_spec, len(tokens))
        want = engine.read_kv(table, tokens)
        for block, place, before in zip(start_read_kv(engine, table, tokens, out).blocks(), out, want, strict=True):
            assert (block.plane, block.layers, block.tokens, block.heads) == (before.plane, before.layers, before.tokens, before.heads)
            assert np.array_equal(bits(place), bits(before.values))
            assert block.values.ctypes.data == place.ctypes.data
            assert block.values.flags.c_contiguous
        assert (memory[-64:] == 0xA5).all()
    for wrong in (out[:1], (out[0], out[1][:, 1:])):
        with pytest.raises(ValueError, match="out"):
            engine.read_kv(table, TokenRange(0, 40), wrong)


def test_copy_page_copies_every_slot_and_only_that_page(engine: Engine) -> None:
    size = engine.config.page_size
    prefill(engine, random_ids(63, 2 * size), pages_for(engine, 2 * size))
    source, destination = pages_for(engine, 2 * size)[1], pages_for(engine, 1, turn=1)[0]
    expected = all_kv(engine)
    expected[:, :, destination * size : (destination + 1) * size] = expected[:, :, source * size : (source + 1) * size]
    engine.copy_page(source, destination)
    assert np.array_equal(all_kv(engine), expected)


def test_a_step_writes_only_its_own_slots(engine: Engine) -> None:
    """Padding of a bucket, and the rest of a page, stay as they were."""
    size = engine.config.page_size
    fill(engine, list(range(engine.config.num_pages)), 3.0)
    before = all_kv(engine)
    pages = pages_for(engine, 2 * size)
    engine.step(step_of(Row(random_ids(64, size + 2), 0, pages), Row(random_ids(65, 1), 0, pages_for(engine, 1, 1))))
    engine.step(step_of(Row(random_ids(66, 1), size + 2, pages)))
    changed = (all_kv(engine) != before).any(axis=(0, 1, 3, 4))
    positions = np.arange(size + 3)
    slots = np.array(pages)[positions // size] * size + positions % size
    assert sorted(np.flatnonzero(changed)) == sorted([*slots, pages_for(engine, 1, 1)[0] * size])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_kv_is_rounded_to_nearest_even_when_written(
    name: str, engines: Engines, cases: dict[str, Case], kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV of the first layer depends on no stored KV: what a 16-bit pool holds is the float32 pool's value, rounded by numpy."""
    ids = random_ids(67, 60)
    stored = []
    wide = engines(name, "one layer")
    if (name, kv_dtype) == ("jax", "float16"):  # no native layers over such a pool, and other products round differently
        monkeypatch.setattr(JaxOps, "for_layers", lambda ops, compute_dtype: (False, ops))
        wide = make_engine(name, cases["one layer"].model_dir, page_size=cases["one layer"].page_sizes[name])
    for engine in (wide, engines(name, "one layer", kv_dtype)):
        pages = pages_for(engine, 60)
        prefill(engine, ids, pages)
        stored.append(engine.read_kv(table_of(pages), TokenRange(0, 60)))
    for wide, narrow in zip(*stored, strict=True):
        assert narrow.values.dtype == KV_DTYPES[kv_dtype]
        assert np.array_equal(wide.values.astype(narrow.values.dtype).view(np.uint16), narrow.values.view(np.uint16))


def test_both_engines_store_the_same_bfloat16_kv(engines: Engines) -> None:
    """Up to the float32 noise before rounding: few values land on the other side of a rounding boundary, and then by one step."""
    ids = random_ids(68, 60)
    stored = []
    for name in sorted(MODULES):
        engine = engines(name, "one layer", "bfloat16")
        prefill(engine, ids, pages_for(engine, 60))
        stored.append(np.stack([block.values for block in engine.read_kv(table_of(pages_for(engine, 60)), TokenRange(0, 60))]))
    one, other = (values.view(np.int16).astype(np.int32) for values in stored)
    assert np.abs(one - other).max() <= 1
    assert (one != other).mean() < 1e-3


def test_attention_reads_what_was_stored(name: str, engines: Engines) -> None:
    """Keys of the chunk itself are read rounded, as a later step reads them: one chunk and stepwise differ by float32 noise only."""
    engine = engines(name, "one layer", "bfloat16")
    ids = random_ids(69, 24)
    at_once = engine.logits(step_of(Row(ids, 0, pages_for(engine, 24, 0))))
    for position, token in enumerate(ids):
        stepwise = engine.logits(step_of(Row(np.array([token]), position, pages_for(engine, 24, 1))))
    exact = engines(name, "one layer").logits(step_of(Row(ids, 0, pages_for(engines(name, "one layer"), 24))))
    assert relative_error(at_once, stepwise) < EXACT
    assert relative_error(at_once, exact) > 10 * EXACT


# --- sampling


SAMPLED = SamplingParams(seed=1234, max_tokens=9, temperature=0.9, top_k=50, top_p=0.95, num_logprobs=3)


def test_step_samples_as_the_shared_sampler_does(small: Engine) -> None:
    prompts = [random_ids(70 + i, 9 + i) for i in range(3)]
    log = random_ids(75, 2)
    penalised = SamplingParams(seed=5, max_tokens=9, temperature=0.0, repetition_penalty=1.4, logit_bias=((17, 3.0),))
    rows = [
        Row(prompt, 0, pages_for(small, 20, turn), params=params, prompt_ids=prompt, log_ids=log)
        for turn, (prompt, params) in enumerate(zip(prompts, (SAMPLED, GREEDY, penalised), strict=True))
    ]
    step = step_of(*rows)
    logits = small.logits(step)
    records = small.step(step).records
    for row, row_logits, record in zip(rows, logits, records, strict=True):
        want = sample(row_logits, row.params, row.prompt_ids, row.log_ids, 2)
        assert record.token_id == want.token_id
        assert (record.logprob is None) == (row.params.num_logprobs is None)
        assert [token for token, _ in record.top_logprobs] == [token for token, _ in want.top_logprobs]
    assert records[1].token_id == int(logits[1].argmax())


def test_a_seeded_row_is_independent_of_its_neighbours(small: Engine) -> None:
    """Alone, beside rows with other seeds, and at another row index: the same tokens."""
    prompt = random_ids(80, 12)
    mine = pages_for(small, 30, 0)

    def run(beside: int, index: int) -> list[int]:
        prefill(small, prompt[:-1], mine)
        tokens: list[int] = []
        for position in range(8):
            pending = np.array([tokens[-1] if tokens else prompt[-1]], np.int32)
            row = Row(pending, 11 + position, mine, params=SAMPLED, prompt_ids=prompt, log_ids=np.array(tokens, np.int32))
            others = [
                Row(random_ids(81, 1), 0, pages_for(small, 8, 1 + i), params=replace(SAMPLED, seed=position * 7 + i)) for i in range(beside)
            ]
            rows = [*others[:index], row, *others[index:]]
            tokens.append(small.step(step_of(*rows)).records[index].token_id)
        return tokens

    alone = run(0, 0)
    assert len(set(alone)) > 1
    assert run(2, 0) == run(2, 2) == run(1, 1) == alone


# --- counters, warm-up, identity


def test_nothing_is_compiled_after_warm_up_and_no_page_changes(name: str, cases: dict[str, Case]) -> None:
    engine = make_engine(name, cases["4 heads, 2 kv"].model_dir, max_step_tokens=24, max_rows=3, num_pages=30)
    ids = random_ids(90, 24)
    pages = [3, 4, 5, 6]
    prefill(engine, ids, pages)
    before = all_kv(engine)
    seen: list[tuple[int, int, str]] = []
    engine.warm_up(lambda done, total, what: seen.append((done, total, what)))
    assert np.array_equal(all_kv(engine), before)
    assert [done for done, _, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total, _ in seen} == {len(seen)}

    compiled = engine.stats().compilations
    for count in (1, 2, 15, 16, 17, 23, 24):
        engine.step(step_of(Row(ids[:count], 0, pages)))
    for num_rows in (1, 2, 3):
        engine.step(step_of(*(Row(ids[:1], 24, [*pages[:3], 10 + i]) for i in range(num_rows))))
        engine.logits(step_of(*(Row(ids[:2], 0, [10 + i]) for i in range(num_rows))))
    for block in engine.read_kv(table_of(pages), TokenRange(1, 20)):
        engine.write_kv(table_of(pages), block)
    engine.copy_page(3, 7)
    assert engine.stats().compilations == compiled


def test_stats_count_steps(small: Engine) -> None:
    before = small.stats().steps
    for _ in range(3):
        small.step(step_of(Row(random_ids(91, 2), 0, [1])))
    assert small.stats().steps == before + 3


def test_engines_agree_on_what_the_model_is(engines: Engines, case_name: str) -> None:
    one, other = (engines(name, case_name) for name in sorted(MODULES))
    assert one.weights_digest == other.weights_digest
    assert one.kv_spec == other.kv_spec
    assert one.spec == other.spec
    assert one.layout.name != other.layout.name
    assert (one.name, other.name) == tuple(sorted(MODULES))


# --- what is refused

GOOD = step_of(Row(random_ids(95, 10), 3, [1, 2]), Row(random_ids(96, 1), 8, [3, 4]))


def _with_sample(**changes: object) -> Step:
    return replace(GOOD, samples=(replace(GOOD.samples[0], **changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (replace(GOOD, token_ids=GOOD.token_ids.astype(np.int64)), "token_ids"),
        (replace(GOOD, token_ids=np.full(11, 300, np.int32)), "token_ids"),
        (replace(GOOD, token_ids=np.full(11, -1, np.int32)), "token_ids"),
        (replace(GOOD, token_ids=GOOD.token_ids[:10]), "row_starts"),
        (replace(GOOD, row_starts=np.array([0, 11, 11], np.int32)), "row_starts"),
        (replace(GOOD, row_starts=np.array([0, 11], np.int32)), "row_starts"),
        (replace(GOOD, context_lens=np.array([3, -1], np.int32)), "context_lens"),
        (replace(GOOD, context_lens=np.array([3, 160], np.int32)), "context_lens"),
        (replace(GOOD, context_lens=np.array([3, 16], np.int32)), "page_tables[1]"),
        (replace(GOOD, page_tables=np.array([[1, 2], [3, 40]], np.int32)), "page_tables[1]"),
        (replace(GOOD, page_tables=np.array([[-1, 2], [3, 4]], np.int32)), "page_tables[0]"),
        (replace(GOOD, page_tables=GOOD.page_tables[0]), "page_tables"),
        (step_of(*(Row(random_ids(97, 1), 0, [i]) for i in range(5))), "max_rows"),
        (step_of(Row(random_ids(97, 65), 0, list(range(9)))), "max_step_tokens"),
        (_with_sample(row=2), "samples"),
        (replace(GOOD, samples=(GOOD.samples[0], GOOD.samples[0])), "samples"),
        (_with_sample(position=4), "samples"),
        (_with_sample(prompt_ids=np.array([300], np.int32)), "prompt_ids"),
    ],
)
def test_a_broken_step_is_refused_and_changes_nothing(small: Engine, step: Step, field: str) -> None:
    fill(small, [1, 2, 3, 4], 0.25)  # what the rows of GOOD have in KV; other tests leave NaN
    before = all_kv(small)
    for run in (small.step, small.logits):
        with pytest.raises(ValueError, match=field.replace("[", r"\[")):
            run(step)
    assert np.array_equal(all_kv(small), before)
    small.step(GOOD)


def test_broken_kv_calls_are_refused(small: Engine) -> None:
    table = table_of([1, 2])
    k, _ = small.read_kv(table, TokenRange(0, 16))
    for pages, tokens in ((table, TokenRange(0, 17)), (table_of([1, 40]), TokenRange(0, 9)), (table_of([-1]), TokenRange(0, 1))):
        with pytest.raises(ValueError, match="page_table"):
            small.read_kv(pages, tokens)
    broken = {
        "plane": replace(k, plane="latent"),
        "layers": replace(k, layers=LayerRange(1, 4)),
        "heads": replace(k, heads=HeadRange(1, 3)),
        "shape": replace(k, values=k.values[:, :-1]),
        "dtype": replace(k, values=k.values.astype(ml_dtypes.bfloat16)),
        "page_table": replace(k, tokens=TokenRange(1, 17)),
    }
    before = all_kv(small)
    for field, block in broken.items():
        with pytest.raises(ValueError, match=field):
            small.write_kv(table, block)
    for source, destination in ((40, 0), (0, -1)):
        with pytest.raises(ValueError, match="page"):
            small.copy_page(source, destination)
    assert np.array_equal(all_kv(small), before)


@pytest.mark.parametrize(
    "change",
    [
        {"max_context_tokens": 513},
        {"kv_dtype": "int8"},
        {"compute_dtype": "float64"},
        {"page_size": 0},
        {"device": "abacus"},
    ],
)
def test_a_config_that_cannot_be_served_is_refused(name: str, cases: dict[str, Case], change: dict[str, str | int | None]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        make_engine(name, cases["4 heads, 2 kv"].model_dir, **change)
