"""What is particular to the PyTorch engine; what both engines owe is in tests/conformance/test_engine_contract.py."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import pddtorch.engine
import pddtorch.linear
from pddbridge.engine import EngineConfig, KVBlock, SampleRow, Step
from pddbridge.kv_spec import HeadRange, LayerRange, TokenRange
from pddbridge.sampling_params import SamplingParams
from pddkernels.native.build import NO_COMPILER, NativeUnavailableError
from pddkernels.native.torch_native import Native
from pddtorch.engine import TorchEngine, create
from tests.support import oracle
from tests.support.tiny_models import make_tiny_llama

CONFIG = EngineConfig(
    device="cpu",
    compute_dtype="float32",
    kv_dtype="float32",
    page_size=12,
    num_pages=40,
    max_context_tokens=200,
    max_step_tokens=64,
    max_rows=4,
    num_threads=1,
    compile_cache_dir=None,
)
GREEDY = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
NO_IDS = np.zeros(0, np.int32)
TABLE = [7, 31, 11, 5, 9, 2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(
        tmp_path_factory.mktemp("tiny"), num_heads=6, num_kv_heads=3, head_dim=10, hidden=60, attention_bias=True, mlp_bias=True
    )


@pytest.fixture
def engine(model_dir: Path) -> TorchEngine:
    return create(str(model_dir), CONFIG)


def ids_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 300, count).astype(np.int32)


def step_of(rows: Sequence[tuple[np.ndarray, int, list[int]]], sampling: Sequence[int], params: SamplingParams = GREEDY) -> Step:
    """``rows``: new ids, context length, page table; ``sampling``: the rows that sample, at position 0."""
    width = max(len(table) for _, _, table in rows)
    return Step(
        token_ids=np.concatenate([ids for ids, _, _ in rows]),
        row_starts=np.cumsum([0, *(len(ids) for ids, _, _ in rows)], dtype=np.int32),
        context_lens=np.array([context for _, context, _ in rows], np.int32),
        page_tables=np.array([table + [0] * (width - len(table)) for _, _, table in rows], np.int32),
        samples=tuple(SampleRow(row, 0, params, NO_IDS, NO_IDS) for row in sampling),
    )


def all_kv(engine: TorchEngine) -> list[np.ndarray]:
    """Every slot of every page but the scratch page, per plane."""
    pages = np.arange(CONFIG.num_pages, dtype=np.int32)
    return [block.values for block in engine.read_kv(pages, TokenRange(0, CONFIG.num_pages * CONFIG.page_size))]


def test_logits_equal_the_oracle_through_chunks_decodes_and_extends(engine: TorchEngine, model_dir: Path) -> None:
    ids = ids_of(1, 60)
    want = oracle.logits(model_dir, ids.tolist())
    position = 0
    for count in (12, 1, 1, 23, 1, 13, 9):
        got = engine.logits(step_of([(ids[position : position + count], position, TABLE)], [0]))
        position += count
        assert got.dtype == np.float32
        assert np.abs(got[0] - want[position - 1]).max() < 1e-4


def test_a_row_is_the_same_alone_and_in_company(engine: TorchEngine, model_dir: Path) -> None:
    """Decode rows of unequal length beside a chunk, many steps (not only the first): each equals its own run."""
    prompts = [ids_of(seed, 44) for seed in (2, 3, 4)]
    tables = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    lens = [17, 3, 25]
    engine.step(step_of([(prompt[:n], 0, table) for prompt, n, table in zip(prompts, lens, tables, strict=True)], []))
    want = [oracle.logits(model_dir, prompt.tolist()) for prompt in prompts]
    for i in range(10):
        rows = [(prompt[n + i : n + i + 1], n + i, table) for prompt, n, table in zip(prompts, lens, tables, strict=True)]
        chunk = (ids_of(5, 20)[2 * i : 2 * i + 2], 2 * i, [13, 14])
        got = engine.logits(step_of([*rows[:2], chunk, rows[2]], [3, 0, 1]))
        for logits, row in zip(got, (2, 0, 1), strict=True):
            assert np.abs(logits - want[row][lens[row] + i]).max() < 1e-4


def test_without_sampling_rows_the_same_kv_is_stored(engine: TorchEngine) -> None:
    ids = ids_of(6, 30)
    assert engine.step(step_of([(ids, 0, TABLE)], [])).records == ()
    silent = engine.read_kv(np.array(TABLE, np.int32), TokenRange(0, 30))
    engine.step(step_of([(ids, 0, [20, 21, 22])], [0]))
    sampled = engine.read_kv(np.array([20, 21, 22], np.int32), TokenRange(0, 30))
    for block, other in zip(silent, sampled, strict=True):
        assert np.array_equal(block.values, other.values)
    assert engine.logits(step_of([(ids[:1], 0, TABLE)], [])).shape == (0, 300)


def test_bfloat16_kv_is_rounded_to_nearest_even_when_written(model_dir: Path) -> None:
    """Layer 0's K and V do not depend on what was stored before, so both engines compute the same values for it."""
    ids = ids_of(7, 40)
    blocks = []
    for kv_dtype in ("float32", "bfloat16"):
        engine = create(str(model_dir), replace(CONFIG, kv_dtype=kv_dtype))
        engine.step(step_of([(ids, 0, TABLE)], []))
        blocks.append(engine.read_kv(np.array(TABLE, np.int32), TokenRange(0, 40)))
    for exact, rounded in zip(*blocks, strict=True):
        assert rounded.values.dtype == engine.kv_spec.np_dtype
        bits = exact.values[0].view(np.uint32)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert np.array_equal(rounded.values[0].view(np.uint16), nearest_even.astype(np.uint16))


@pytest.mark.parametrize(("compute_dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_lower_precisions_stay_near_the_oracle(model_dir: Path, compute_dtype: str, kv_dtype: str) -> None:
    engine = create(str(model_dir), replace(CONFIG, compute_dtype=compute_dtype, kv_dtype=kv_dtype))
    ids = ids_of(8, 40)
    want = oracle.logits(model_dir, ids.tolist())
    first = engine.logits(step_of([(ids[:35], 0, TABLE)], [0]))[0]
    second = engine.logits(step_of([(ids[35:36], 35, TABLE)], [0]))[0]
    for got, position in ((first, 34), (second, 35)):
        assert np.linalg.norm(got - want[position]) / np.linalg.norm(want[position]) < 0.05


def test_the_pool_stays_where_it_is(engine: TorchEngine) -> None:
    pointers = [tensor.data_ptr() for layer in engine._pool.layers for tensor in layer]
    ids = ids_of(9, 30)
    engine.step(step_of([(ids, 0, TABLE)], [0]))
    block = engine.read_kv(np.array(TABLE, np.int32), TokenRange(3, 20))[0]
    engine.write_kv(np.array([20, 21], np.int32), block)
    engine.copy_page(7, 30)
    assert [tensor.data_ptr() for layer in engine._pool.layers for tensor in layer] == pointers


def test_read_gives_a_copy(engine: TorchEngine) -> None:
    engine.step(step_of([(ids_of(9, 30), 0, TABLE)], []))
    table, tokens = np.array(TABLE, np.int32), TokenRange(0, 30)
    before = engine.read_kv(table, tokens)[0]
    kept = before.values.copy()
    engine.step(step_of([(ids_of(10, 30), 0, TABLE)], []))
    assert np.array_equal(before.values, kept)
    assert not np.array_equal(engine.read_kv(table, tokens)[0].values, kept)


def test_write_touches_the_block_and_nothing_else(engine: TorchEngine) -> None:
    """Part of the layers, tokens and heads; the array read-only, as it comes from a socket."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 17, 1, 10)).astype(np.float32)
    values.flags.writeable = False
    before = all_kv(engine)
    engine.write_kv(np.array(TABLE, np.int32), KVBlock("v", LayerRange(1, 3), TokenRange(10, 27), HeadRange(2, 3), values))
    expected = [plane.copy() for plane in before]
    for i, position in enumerate(range(10, 27)):
        slot = TABLE[position // 12] * 12 + position % 12
        expected[1][1:3, slot, 2:3] = values[:, i]
    for got, want in zip(all_kv(engine), expected, strict=True):
        assert np.array_equal(got, want)


def test_copy_page_copies_all_of_it_and_nothing_else(engine: TorchEngine) -> None:
    engine.step(step_of([(ids_of(11, 30), 0, TABLE)], []))
    expected = [plane.copy() for plane in all_kv(engine)]
    for plane in expected:
        plane[:, 3 * 12 : 4 * 12] = plane[:, 31 * 12 : 32 * 12]
    engine.copy_page(31, 3)
    for got, want in zip(all_kv(engine), expected, strict=True):
        assert np.array_equal(got, want)


def test_nan_in_unused_slots_changes_no_bit(engine: TorchEngine) -> None:
    ids = ids_of(12, 41)
    step = step_of([(ids[29:30], 29, TABLE), (ids[:1], 3, [1]), (ids[30:36], 2, [4])], [0, 1, 2])
    engine.step(step_of([(ids[:29], 0, TABLE), (ids[:3], 0, [1]), (ids[:2], 0, [4])], []))
    clean = engine.logits(step)
    kv = dict(zip(("k", "v"), all_kv(engine), strict=True))
    for name, values in kv.items():
        used = [page * 12 + slot for page in TABLE[:2] for slot in range(12)]
        used += [TABLE[2] * 12 + slot for slot in range(6)] + [12 + slot for slot in range(4)] + [4 * 12 + slot for slot in range(8)]
        poisoned = np.full_like(values, np.nan)
        poisoned[:, used] = values[:, used]
        block = KVBlock(name, LayerRange(0, 3), TokenRange(0, values.shape[1]), HeadRange(0, 3), poisoned)
        engine.write_kv(np.arange(40, dtype=np.int32), block)
    assert np.array_equal(engine.logits(step), clean)


def test_records_come_in_the_order_asked_for(engine: TorchEngine) -> None:
    """Greedy and sampled rows mixed: the device's argmax and the host's sampler must not swap places."""
    sampled = SamplingParams(seed=3, max_tokens=9, temperature=0.9, num_logprobs=2)
    rows = [(ids_of(seed, 9), 0, [seed]) for seed in (1, 2, 3)]
    base = step_of(rows, [])
    asked = tuple(SampleRow(row, 0, params, ids_of(row + 1, 9), NO_IDS) for row, params in ((2, GREEDY), (0, sampled), (1, GREEDY)))
    together = engine.step(replace(base, samples=asked)).records
    alone = [engine.step(replace(base, samples=(sample,))).records[0] for sample in asked]
    assert list(together) == alone
    assert [record.logprob is not None for record in together] == [False, True, False]
    assert together[0].token_id == engine.logits(replace(base, samples=asked))[0].argmax()


def test_broken_numbers_are_refused_not_served(engine: TorchEngine) -> None:
    nan = np.full((3, 4, 3, 10), np.nan, np.float32)
    engine.write_kv(np.array(TABLE, np.int32), KVBlock("v", LayerRange(0, 3), TokenRange(0, 4), HeadRange(0, 3), nan))
    with pytest.raises(ValueError, match="logits: the largest of row 0 is nan"):
        engine.step(step_of([(ids_of(1, 1), 4, TABLE)], [0]))


def test_warm_up_reports_its_progress_and_leaves_pages_alone(engine: TorchEngine) -> None:
    engine.step(step_of([(ids_of(13, 30), 0, TABLE)], []))
    before, steps = all_kv(engine), engine.stats().steps
    seen: list[tuple[int, int]] = []
    labels: list[str] = []

    def progress(done: int, total: int, what: str) -> None:
        seen.append((done, total))
        labels.append(what)

    engine.warm_up(progress)
    assert seen == [(i, len(seen)) for i in range(1, len(seen) + 1)]
    assert {"decode, 1 rows", "decode, 4 rows", "chunk of 64 tokens"} <= set(labels)
    for got, want in zip(all_kv(engine), before, strict=True):
        assert np.array_equal(got, want)
    assert engine.stats().steps == steps


@pytest.mark.parametrize(("max_rows", "max_step_tokens", "max_context_tokens"), [(1, 1, 2), (4, 2, 40), (3, 64, 13), (2, 8, 8)])
def test_warm_up_fits_small_limits(model_dir: Path, max_rows: int, max_step_tokens: int, max_context_tokens: int) -> None:
    config = replace(CONFIG, max_rows=max_rows, max_step_tokens=max_step_tokens, max_context_tokens=max_context_tokens)
    calls: list[str] = []
    create(str(model_dir), config).warm_up(lambda done, total, what: calls.append(what))
    assert calls


def test_the_step_thread_gets_its_threads(engine: TorchEngine) -> None:
    """OpenMP counts threads per calling thread; the worker's step thread is not the one that loaded the model."""
    seen: list[int] = []

    def run() -> None:
        torch.set_num_threads(2)
        engine.step(step_of([(ids_of(1, 3), 0, TABLE)], [0]))
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [CONFIG.num_threads]


def test_unpacked_linears_are_counted(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert create(str(model_dir), CONFIG).stats().fallbacks["unpacked_linear"] == 0
    monkeypatch.setattr(pddtorch.linear, "can_pack", lambda device, dtype: False)
    engine = create(str(model_dir), CONFIG)
    assert engine.stats().fallbacks["unpacked_linear"] == 3 * 4 + 1
    ids = ids_of(14, 20)
    got = engine.logits(step_of([(ids, 0, TABLE)], [0]))[0]
    assert np.abs(got - oracle.logits(model_dir, ids.tolist())[-1]).max() < 1e-4


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_without_a_compiler_the_plain_operations_run_and_are_counted(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, compute_dtype: str
) -> None:
    config = replace(CONFIG, compute_dtype=compute_dtype)
    rows = step_of([(ids_of(14, 20), 0, TABLE)], [0])
    native = create(str(model_dir), config)
    assert native.stats().fallbacks == {"unpacked_linear": 0}

    def no_compiler(cache_dir: str | None) -> Native:
        raise NativeUnavailableError(NO_COMPILER, "none here")

    monkeypatch.setattr(pddtorch.engine, "Native", no_compiler)
    portable = create(str(model_dir), config)
    assert portable.stats().fallbacks == {NO_COMPILER: 1, "unpacked_linear": 0}
    want = oracle.logits(model_dir, rows.token_ids.tolist())[-1]
    for engine in (native, portable):
        assert np.abs(engine.logits(rows)[0] - want).max() < (1e-4 if compute_dtype == "float32" else 4e-2 * np.abs(want).max())


def test_int8_weights_are_near_or_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the model, and not the model; refused by name where there are no products for them."""
    config = replace(CONFIG, compute_dtype="int8")
    if Native(None).has_int8:
        rows = step_of([(ids_of(14, 20), 0, TABLE)], [0])
        want = oracle.logits(model_dir, rows.token_ids.tolist())[-1]
        error = np.abs(create(str(model_dir), config).logits(rows)[0] - want).max() / np.abs(want).max()
        bfloat16_error = np.abs(create(str(model_dir), replace(config, compute_dtype="bfloat16")).logits(rows)[0] - want).max()
        assert bfloat16_error / np.abs(want).max() < error < 8e-2
    monkeypatch.setattr(Native, "has_int8", False)
    with pytest.raises(ValueError, match="compute_dtype: int8 needs"):
        create(str(model_dir), config)


@pytest.mark.parametrize("tie", [False, True])
def test_the_head_is_the_checkpoints(tmp_path: Path, tie: bool) -> None:
    model_dir = make_tiny_llama(tmp_path, tie=tie)
    ids = ids_of(15, 20)
    got = create(str(model_dir), CONFIG).logits(step_of([(ids, 0, TABLE)], [0]))[0]
    assert np.abs(got - oracle.logits(model_dir, ids.tolist())[-1]).max() < 1e-4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, device="tpu:x"), "device: given 'tpu:x'"),
        (replace(CONFIG, device="meta"), "device: given 'meta'"),
        (replace(CONFIG, compute_dtype="float64"), "compute_dtype: given 'float64'"),
        (replace(CONFIG, kv_dtype="int8"), "kv_dtype: given 'int8'"),
        (replace(CONFIG, max_context_tokens=513), "max_context_tokens: given 513"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(model_dir: Path, config: EngineConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(str(model_dir), config)


def test_a_missing_device_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device: given 'cuda'"):
        create(str(model_dir), replace(CONFIG, device="cuda"))


def test_breaches_of_the_contract_are_refused_before_any_page_is_touched(engine: TorchEngine) -> None:
    ids = ids_of(16, 14)
    good = step_of([(ids, 0, TABLE)], [0])
    before = all_kv(engine)
    for bad, message in (
        (replace(good, token_ids=np.where(ids == ids[3], 300, ids).astype(np.int32)), "token_ids: given id 300"),
        (replace(good, page_tables=np.array([[7, 40]], np.int32)), "given page 40"),
        (replace(good, page_tables=np.array([[7, -1]], np.int32)), "given page -1"),
        (replace(good, page_tables=np.array([[7]], np.int32)), "14 tokens need 2"),
        (replace(good, context_lens=np.array([190], np.int32)), "context_lens"),
        (replace(good, row_starts=np.array([0, 13], np.int32)), "row_starts"),
        (replace(good, token_ids=ids.astype(np.int64)), "token_ids: given int64"),
        (step_of([(ids, 0, [1, 2]), (ids, 0, [2, 3])], []), "page 2 is written"),
        (step_of([(ids, 0, [1, 2]), (ids[:1], 13, [2, 3])], []), "page 2 is written"),
        (replace(good, samples=(SampleRow(0, 1, GREEDY, ids, NO_IDS),)), "samples position 1"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.step(bad)
    with pytest.raises(ValueError, match="page_table"):
        engine.read_kv(np.array([1], np.int32), TokenRange(0, 13))
    with pytest.raises(ValueError, match="destination: given page 40"):
        engine.copy_page(0, 40)
    for got, want in zip(all_kv(engine), before, strict=True):
        assert np.array_equal(got, want)


def test_rows_may_read_a_page_together(engine: TorchEngine, model_dir: Path) -> None:
    """A shared prefix: both rows name page 7, neither writes it."""
    prefix, tails = ids_of(17, 12), (ids_of(18, 5), ids_of(19, 1))
    engine.step(step_of([(prefix, 0, [7])], []))
    got = engine.logits(step_of([(tails[0], 12, [7, 8]), (tails[1], 12, [7, 9])], [0, 1]))
    for logits, tail in zip(got, tails, strict=True):
        assert np.abs(logits - oracle.logits(model_dir, [*prefix, *tail])[-1]).max() < 1e-4


def test_a_thread_that_calls_launches_on_the_engines_gpu(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched by Triton goes to the current device of the thread."""
    told: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    for name, wanted in (("cuda:1", [torch.device("cuda", 1)]), ("cuda", []), ("cpu", [])):
        monkeypatch.setattr(engine, "_device", torch.device(name))
        thread = threading.Thread(target=engine._own_thread)
        thread.start()
        thread.join()
        assert told == wanted
        told.clear()
