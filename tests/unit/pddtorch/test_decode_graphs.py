"""Decode steps that are recorded and replayed, on a CPU with recorders that stand in for CUDA's: logits, tokens and KV of eager steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pddtorch.decode_graphs
import pddtorch.engine
from pddbridge.checkpoint import open_checkpoint
from pddbridge.engine import KVBlock, Step
from pddbridge.kv_spec import HeadRange, LayerRange, TokenRange
from pddbridge.sampling_params import SamplingParams
from pddkernels.torch_ops import PortableOps, Problem
from pddtorch import cuda_graphs
from pddtorch.cuda_graphs import CudaRecorder
from pddtorch.decode_graphs import NO_FIXED_KERNELS, NOT_RECORDED, TOO_MANY_ROWS, bucket_sizes
from pddtorch.engine import TorchEngine
from tests.support.engines import CONFIG, Row, make_engine, prefill, random_ids, step_of
from tests.support.fixed_ops import FixedOps
from tests.support.recorders import OpRecorder
from tests.support.tiny_families import make_tiny_family
from tests.support.tiny_models import make_tiny_llama

GRAPHED = replace(CONFIG, page_size=12, num_pages=30, max_context_tokens=50, max_rows=6, run_ahead=True, decode_graphs=True)
DRAWN = SamplingParams(seed=5, max_tokens=64, temperature=0.9, top_p=0.95)
RECORD = SamplingParams(seed=5, max_tokens=64, num_logprobs=2)
ERROR = 1e-4


@dataclass(frozen=True)
class Pair:
    """The same model, of which one records, with the same KV in every page."""

    graphed: TorchEngine
    eager: TorchEngine
    recorder: OpRecorder

    def fill(self, seed: int) -> None:
        for engine in (self.graphed, self.eager):
            fill_pages(engine, seed)


def engine_of(model: Path, recorder: OpRecorder | None, **changes: int | bool) -> TorchEngine:
    return TorchEngine(open_checkpoint(str(model)), replace(GRAPHED, decode_graphs=recorder is not None, **changes), recorder)  # type: ignore[arg-type]


def pair_of(model: Path, **changes: int | bool) -> Pair:
    recorder = OpRecorder()
    pair = Pair(engine_of(model, recorder, **changes), engine_of(model, None, **changes), recorder)
    for engine in (pair.graphed, pair.eager):
        engine.warm_up(lambda done, total, what: None)
    return pair


@contextmanager
def without_native_kernels() -> Iterator[None]:
    """As on a GPU: PyTorch's operations around the attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pddtorch.engine, "_open_native", lambda device, cache_dir: (None, {}))
        patch.setattr(pddtorch.engine, "choose", lambda problem, device, native: FixedOps(problem, device, {}))
        yield


@pytest.fixture(scope="module", autouse=True)
def _plain() -> Iterator[None]:
    with without_native_kernels():
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama") / "m", num_heads=6, num_kv_heads=3, head_dim=10, hidden=60, num_layers=2)


@pytest.fixture(scope="module")
def pair(llama: Path) -> Pair:
    return pair_of(llama)


@pytest.fixture(scope="module")
def pairs(pair: Pair, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Three KV heads on pages of 12, on pages of 3, and a model with windows and caps on pages of 16."""
    gemma = make_tiny_family(tmp_path_factory.mktemp("gemma") / "m", "gemma2")
    return {"page 12": pair, "page of kv heads": pair_of(llama, page_size=3, num_pages=110), "windows": pair_of(gemma, page_size=16)}


def fill_pages(engine: TorchEngine, seed: int) -> None:
    """Unit normal KV in every page."""
    rng, spec = np.random.default_rng(seed), engine.kv_spec
    tokens = TokenRange(0, engine.config.num_pages * engine.config.page_size)
    for plane in spec.groups[0].planes:
        values = rng.standard_normal((spec.num_layers, len(tokens), plane.num_heads, plane.head_dim), np.float32)
        block = KVBlock(plane.name, LayerRange(0, spec.num_layers), tokens, HeadRange(0, plane.num_heads), values)
        engine.write_kv(np.arange(engine.config.num_pages, dtype=np.int32), block)


def all_kv(engine: TorchEngine) -> np.ndarray:
    """[2, layers, num_pages * page_size, kv_heads, dim]."""
    tokens = TokenRange(0, engine.config.num_pages * engine.config.page_size)
    return np.stack([block.values.copy() for block in engine.read_kv(np.arange(engine.config.num_pages, dtype=np.int32), tokens)])


def decode_step(engine: TorchEngine, contexts: list[int], seed: int, params: SamplingParams | None = None) -> Step:
    """Rows of one token on pages of their own, drawn from the whole pool."""
    rng, size = np.random.default_rng(seed), engine.config.page_size
    free = rng.permutation(engine.config.num_pages).tolist()
    rows = []
    for context_len in contexts:
        pages = [free.pop() for _ in range(context_len // size + 1)]
        ids = random_ids(int(rng.integers(1000)), 1, engine.spec.vocab_size)
        rows.append(Row(ids, context_len, pages) if params is None else Row(ids, context_len, pages, params=params))
    return step_of(*rows)


def check(pair: Pair, step: Step) -> None:
    """Logits and KV are those of the eager engine, and no other slot is touched, to the bit."""
    before, size = all_kv(pair.graphed), pair.graphed.config.page_size
    replays = pair.recorder.num_replays
    got, want = pair.graphed.logits(step), pair.eager.logits(step)
    assert pair.recorder.num_replays == replays + 1
    assert np.abs(got - want).max() < ERROR
    after, wanted = all_kv(pair.graphed), all_kv(pair.eager)
    written = step.page_tables[np.arange(len(step.context_lens)), step.context_lens // size] * size + step.context_lens % size
    assert np.abs(after[:, :, written] - wanted[:, :, written]).max() < ERROR
    assert np.array_equal(np.delete(after, written, 2), np.delete(before, written, 2))


contexts_of = st.lists(st.sampled_from((0, 1, 2, 3, 11, 12, 13, 15, 16, 17, 23, 24, 30, 36, 48, 49)), min_size=1, max_size=6)


@pytest.mark.parametrize("name", ["page 12", "page of kv heads", "windows"])
@settings(max_examples=8, deadline=None)
@given(steps=st.lists(contexts_of, min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_drawn_steps_are_those_of_an_eager_engine(pairs: dict[str, Pair], name: str, steps: list[list[int]], seed: int) -> None:
    """One after the other on the same graphs: more rows and fewer, longer and shorter ones, other pages each time."""
    pair = pairs[name]
    pair.fill(seed)
    for turn, contexts in enumerate(steps):
        if sum(context_len // pair.graphed.config.page_size + 1 for context_len in contexts) <= pair.graphed.config.num_pages:
            check(pair, decode_step(pair.graphed, contexts, seed + turn))


def test_every_number_of_rows_has_a_graph(pair: Pair) -> None:
    pair.fill(1)
    for count in range(1, 7):
        check(pair, decode_step(pair.graphed, [12, 1, 24, 0, 11, 13][:count], count))


def test_logits_are_those_of_the_rows_that_sample_in_their_order(pair: Pair) -> None:
    pair.fill(2)
    step = decode_step(pair.graphed, [5, 20, 12], 3)
    for rows in ((2, 0), (1,), ()):
        chosen = replace(step, samples=tuple(step.samples[row] for row in rows))
        got, want = pair.graphed.logits(chosen), pair.eager.logits(chosen)
        assert got.shape == want.shape
        assert np.abs(got - want).max(initial=0) < ERROR


def chain(engine: TorchEngine, params: tuple[SamplingParams, ...], count: int) -> list[list[int]]:
    """Tokens by step of ``count`` steps, all of them started before anybody looks at one's tokens."""
    prompts = [random_ids(40 + i, length, engine.spec.vocab_size) for i, length in enumerate((13, 12, 5))][: len(params)]
    pages = [[4 + 4 * i + page for page in range(4)] for i in range(len(params))]
    for ids, own in zip(prompts, pages, strict=True):
        prefill(engine, ids[:-1], own)
    rows = [Row(ids[-1:], len(ids) - 1, own, params=row) for ids, own, row in zip(prompts, pages, params, strict=True)]
    step = step_of(*rows)
    steps = [engine.start_step(step)]
    for turn in range(1, count):
        assert steps[-1].feeds_next
        samples = tuple(replace(s, position=s.position + 1, log_ids=np.zeros(turn - 1, np.int32)) for s in step.samples)
        step = replace(step, context_lens=step.context_lens + 1, token_ids=np.full_like(step.token_ids, turn), samples=samples)
        steps.append(engine.start_step(step, steps[-1]))
    return [[record.token_id for record in under_way.result().records] for under_way in steps]


@pytest.mark.parametrize(
    "params", [(replace(DRAWN, temperature=0.0),) * 3, (DRAWN, replace(DRAWN, seed=9), replace(DRAWN, temperature=0.0))]
)
def test_steps_ahead_of_their_tokens_go_on_with_what_was_chosen(llama: Path, params: tuple[SamplingParams, ...]) -> None:
    """Greedy, and drawn on the device; more steps than there are graphs, with fewer rows than theirs."""
    pair = pair_of(llama, sample_on_device=True)
    replays = pair.recorder.num_replays
    assert chain(pair.graphed, params, 8) == chain(pair.eager, params, 8)
    assert pair.recorder.num_replays == replays + 8


def test_what_a_step_came_to_may_be_read_after_others_have_run(pair: Pair) -> None:
    """On the host, which looks at the logits: they are the step's own, whichever graph ran since."""
    pair.fill(4)
    steps = [decode_step(pair.graphed, contexts, seed, RECORD) for seed, contexts in enumerate(([20, 3], [7, 9], [30]))]
    late = [pair.graphed.start_step(step) for step in steps]
    for step, under_way in zip(steps, late, strict=True):
        got, want = under_way.result().records, pair.eager.step(step).records
        assert [record.token_id for record in got] == [record.token_id for record in want]
        for record, wanted in zip(got, want, strict=True):
            assert record.logprob == pytest.approx(wanted.logprob, abs=ERROR)


def test_a_row_that_was_preempted_comes_back_to_its_tokens(pair: Pair) -> None:
    """Its KV is recomputed on other pages, while a neighbour went on and took its old ones."""
    pair.fill(5)
    prompt, log = random_ids(7, 12, pair.graphed.spec.vocab_size), []
    tokens: dict[str, list[int]] = {}
    for name, engine in (("graphed", pair.graphed), ("eager", pair.eager)):
        prefill(engine, prompt[:-1], [1, 2, 3])
        log = []
        for turn in range(9):
            known = np.array([*prompt, *log], np.int32)
            if turn == 4:  # the neighbour takes its pages; what it had is computed again
                prefill(engine, known[:-1], [20, 21, 22])
            pages, others = ([1, 2, 3], [8, 9]) if turn < 4 else ([20, 21, 22], [1, 2])
            rows = Row(known[-1:], len(known) - 1, pages), Row(random_ids(turn, 1), 11 + turn % 2, others)
            log.append(engine.step(step_of(*rows)).records[0].token_id)
        tokens[name] = log
    assert tokens["graphed"] == tokens["eager"]


def test_recording_and_warming_up_touch_no_page(llama: Path) -> None:
    engine = engine_of(llama, OpRecorder())
    fill_pages(engine, 6)
    before, told = all_kv(engine), []
    engine.warm_up(lambda done, total, what: told.append((done, total, what)))
    assert np.array_equal(all_kv(engine), before)
    assert [done for done, _, _ in told] == list(range(1, told[0][1] + 1))
    assert [what for _, _, what in told[:4]] == [f"graph of decode, {rows} rows" for rows in (6, 4, 2, 1)]


def test_recorded_steps_are_compilations_and_there_are_none_later(llama: Path) -> None:
    pair = pair_of(llama)
    assert (pair.graphed.stats().compilations, pair.eager.stats().compilations) == (4, 0)
    assert pair.graphed.stats().graphed_steps == 0
    for count in range(1, 7):
        pair.graphed.step(decode_step(pair.graphed, [3] * count, count))
    pair.graphed.warm_up(lambda done, total, what: None)
    mixed = step_of(Row(random_ids(1, 5), 0, [0]), Row(random_ids(2, 1), 3, [1]))
    pair.graphed.step(mixed)
    stats = pair.graphed.stats()
    assert (stats.compilations, stats.steps, stats.graphed_steps) == (4, 7, 6)
    assert not any(stats.fallbacks[name] for name in stats.fallbacks if name != "unpacked_linear")


def test_what_runs_without_its_graph_is_counted(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pddtorch.decode_graphs, "MOST_ROWS", 2)
    engine = engine_of(llama, OpRecorder())
    engine.step(decode_step(engine, [3], 0))
    assert engine.stats().fallbacks[NOT_RECORDED] == 1
    engine.warm_up(lambda done, total, what: None)
    assert TOO_MANY_ROWS not in engine.stats().fallbacks
    for count in (1, 2, 3, 4):
        engine.step(decode_step(engine, [3] * count, 0))
    stats = engine.stats()
    assert (stats.fallbacks[TOO_MANY_ROWS], stats.fallbacks[NOT_RECORDED], stats.graphed_steps) == (2, 1, 2)


def test_kernels_that_cannot_be_recorded_are_counted_and_run(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def portable(problem: Problem, device: torch.device, native: None) -> PortableOps:
        return PortableOps(problem, device, {})

    monkeypatch.setattr(pddtorch.engine, "choose", portable)
    engine = engine_of(llama, OpRecorder())
    engine.warm_up(lambda done, total, what: None)
    engine.step(decode_step(engine, [3], 0))
    stats = engine.stats()
    assert (stats.fallbacks[NO_FIXED_KERNELS], stats.compilations, stats.graphed_steps) == (1, 0, 0)


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_device_that_replays_nothing_refuses_to(llama: Path, engine: str) -> None:
    with pytest.raises(ValueError, match="decode_graphs: given True, allowed False"):
        make_engine(engine, llama, decode_graphs=True)


@pytest.mark.parametrize(
    ("rows", "tokens", "sizes"),
    [(1, 64, (1,)), (8, 64, (1, 2, 4, 8)), (64, 6, (1, 2, 4, 6)), (900, 999, (*(1 << i for i in range(8)), 256))],
)
def test_graphs_are_of_powers_of_two_and_the_most_rows(rows: int, tokens: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(replace(CONFIG, max_rows=rows, max_step_tokens=tokens)) == sizes


def test_what_waits_for_the_device_cannot_be_recorded() -> None:
    """Of the stand-in: it sees what CUDA would refuse, and keeps numbers of the host as they were."""
    values, seen = torch.ones(3), [2.0]
    with pytest.raises(RuntimeError, match="waits for the device"):
        OpRecorder().record(lambda: values * values.sum().item())
    replay = OpRecorder().record(lambda: values * seen[0])
    values += 1
    seen[0] = 5.0
    assert replay().tolist() == [4.0, 4.0, 4.0]


class FakeCuda:
    """What :class:`CudaRecorder` calls, in order; the current stream is the innermost of ``streams``."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.streams = ["main"]
        self.num_made = 0

    def stream_of(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "side")

    def current(self, device: torch.device) -> FakeStream:
        return FakeStream(self, self.streams[-1])

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    @contextmanager
    def capture(self, graph: FakeGraph, *, pool: str, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        self.calls.append(("capture", graph.number, pool, stream.name, capture_error_mode))
        with self.on(stream):
            yield
        self.calls.append("captured")

    def graph(self) -> FakeGraph:
        self.num_made += 1
        return FakeGraph(self, self.num_made)


@dataclass(frozen=True)
class FakeStream:
    cuda: FakeCuda
    name: str

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.calls.append(f"{self.name} waits for {other.name}")


@dataclass(frozen=True)
class FakeGraph:
    cuda: FakeCuda
    number: int

    def replay(self) -> None:
        self.cuda.calls.append(f"replay {self.number} on {self.cuda.streams[-1]}")


def test_cuda_is_told_to_warm_up_and_then_to_capture_on_one_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    replacements: dict[str, Callable[..., object]] = {
        "Stream": cuda.stream_of,
        "current_stream": cuda.current,
        "stream": cuda.on,
        "graph": cuda.capture,
        "CUDAGraph": cuda.graph,
        "graph_pool_handle": lambda: "pool",
    }
    for name, double in replacements.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(cuda_graphs.torch.cuda, name, double)
    recorder = CudaRecorder(torch.device("cuda"))
    made = []

    def run() -> torch.Tensor:
        cuda.calls.append(f"run on {cuda.streams[-1]}")
        made.append(torch.zeros(1))
        return made[-1]

    first, second = recorder.record(run), recorder.record(run)
    once = ["side waits for main", "run on side", "run on side", ("capture", 1, "pool", "side", "thread_local"), "run on side", "captured"]
    again = [*once[:3], ("capture", 2, *once[3][2:]), *once[4:]]
    assert cuda.calls == [*once, "main waits for side", *again, "main waits for side"]
    assert second() is made[5]
    assert first() is made[2]
    assert cuda.calls[-2:] == ["replay 2 on main", "replay 1 on main"]
