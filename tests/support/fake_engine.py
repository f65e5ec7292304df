"""A tiny deterministic engine for worker tests: no network weights, but real pages. Every token it samples depends on all KV it reads.

KV of a position is a fixed function of its token and position; a sampled token is a checksum over what the pages hold for positions
``[0, n)``. So a misplaced, stale or missing page changes the token, and a slot that nobody wrote (NaN) raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from pddbridge.choice import why_on_host
from pddbridge.engine import EngineConfig, EngineStats, KVBlock, Step, StepResult, StepUnderWay
from pddbridge.engine_checks import check_step
from pddbridge.kv_layout import KVLayout, token_major
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.model_spec import ModelSpec
from pddbridge.sampling_params import TokenRecord
from tests.support.specs import llama_spec

NUM_LAYERS, NUM_HEADS, HEAD_DIM, VOCAB = 2, 3, 4, 300
KV_SPEC = KVSpec.gqa(NUM_LAYERS, NUM_HEADS, HEAD_DIM, "float32")


def kv_of(plane: str, position: int, token_id: int) -> np.ndarray:
    """[layers, heads, dim] f32: small integers, so sums are exact."""
    layer, head, dim = np.ogrid[:NUM_LAYERS, :NUM_HEADS, :HEAD_DIM]
    salt = 3 if plane == "k" else 7
    return ((position * 31 + token_id * salt + layer * 5 + head * 11 + dim * 13) % 97).astype(np.float32)


def expected_token(tokens: Sequence[int], position: int) -> int:
    """What the engine samples at log ``position`` after ``tokens`` (prompt and log so far)."""
    return (position * 17 + sum((at + 1) * _checksum(at, token_id) for at, token_id in enumerate(tokens))) % VOCAB


@cache
def _checksum(position: int, token_id: int) -> int:
    return int(kv_of("k", position, token_id).sum() + 2 * kv_of("v", position, token_id).sum())


def expected_log(prompt: Sequence[int], length: int) -> list[int]:
    """The single-engine run: ``length`` tokens after ``prompt``."""
    log: list[int] = []
    while len(log) < length:
        log.append(expected_token([*prompt, *log], len(log)))
    return log


def blocks_of(tokens: Sequence[int], wanted: TokenRange) -> tuple[KVBlock, ...]:
    """The KV of ``tokens`` at positions ``wanted``, as a prefill worker would send it."""
    layers, heads = LayerRange(0, NUM_LAYERS), HeadRange(0, NUM_HEADS)
    at = range(wanted.start, wanted.stop)
    return tuple(KVBlock(p, layers, wanted, heads, np.stack([kv_of(p, i, tokens[i]) for i in at], axis=1)) for p in ("k", "v"))


@dataclass(frozen=True)
class FakeStep:
    """``fed``: the tokens that a step behind this one goes on with."""

    done: StepResult
    fed: tuple[int, ...]
    feeds_next: bool
    fails: bool

    def result(self) -> StepResult:
        if self.fails:
            raise RuntimeError("the device is gone")
        return self.done


class FakeEngine:
    """``before_step`` is called in the step thread before each step; it may block or raise. ``misfeeds``: whether the device goes on with
    another token than the one at that log position, if it draws it.
    """

    def __init__(
        self,
        *,
        page_size: int = 8,
        num_pages: int = 16,
        max_context: int = 100,
        max_step_tokens: int = 16,
        max_rows: int = 4,
        before_step: Callable[[Step], None] | None = None,
        weights: str = "weights",
        run_ahead: bool = False,
        sample_on_device: bool = False,
        misfeeds: Callable[[int], bool] = lambda position: False,
    ) -> None:
        sizes = (page_size, num_pages, max_context, max_step_tokens, max_rows)
        self._config = EngineConfig("cpu", "float32", "float32", *sizes, 1, None, run_ahead=run_ahead, sample_on_device=sample_on_device)
        self._misfeeds = misfeeds
        self._pages = {p: np.full((num_pages, page_size, NUM_LAYERS, NUM_HEADS, HEAD_DIM), np.nan, np.float32) for p in ("k", "v")}
        self._before_step = before_step
        self._weights = weights
        self._thread: int | None = None
        self.steps: list[Step] = []
        self.calls: list[str] = []  # "step" and "write_kv", in order
        self.reads: list[TokenRange] = []
        self.copies: list[tuple[int, int]] = []
        self.result_fails = False
        self.num_chosen = 0

    name = "fake"
    kv_spec = KV_SPEC

    @property
    def spec(self) -> ModelSpec:
        sizes = {"num_layers": NUM_LAYERS, "num_heads": NUM_HEADS, "num_kv_heads": NUM_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB}
        return llama_spec(**sizes, max_context_tokens=4096, tie_embeddings=True, bos_token_id=None)

    @property
    def layout(self) -> KVLayout:
        return token_major(self._config.page_size, "float32")

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def weights_digest(self) -> str:
        return self._weights

    def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
        self._thread = threading.get_ident()
        progress(1, 1, "nothing to compile")

    def step(self, step: Step) -> StepResult:
        self._check_thread()
        assert len(step.token_ids) <= self._config.max_step_tokens
        assert len(step.context_lens) <= self._config.max_rows
        if self._before_step is not None:
            self._before_step(step)
        self.steps.append(step)
        self.calls.append("step")
        samples = {sample.row: sample for sample in step.samples}
        records: list[TokenRecord] = []
        for row, context_len in enumerate(step.context_lens.tolist()):
            table = step.page_tables[row]
            new = step.token_ids[step.row_starts[row] : step.row_starts[row + 1]].tolist()
            for offset, token_id in enumerate(new):
                self._slot("k", table, context_len + offset)[...] = kv_of("k", context_len + offset, token_id)
                self._slot("v", table, context_len + offset)[...] = kv_of("v", context_len + offset, token_id)
            if row in samples:
                records.append(TokenRecord(self._sample(table, context_len + len(new), samples[row].position)))
        scores = tuple(
            tuple(TokenRecord(token_id, -0.5 * token_id, ((token_id, 0.0),) * row.num_logprobs) for token_id in row.next_ids.tolist())
            for row in step.scores
        )
        self.num_chosen += len(records)
        return StepResult(tuple(records), scores)

    def start_step(self, step: Step, after: StepUnderWay | None = None) -> FakeStep:
        """Done at once, as a device does it in the order of the calls; what came of it is told by ``result`` alone."""
        if after is not None:
            assert isinstance(after, FakeStep)
            check_step(step, self._config, VOCAB, after)
            step = replace(step, token_ids=np.array(after.fed, np.int32))
        done = self.step(step)
        chosen = all(why_on_host(sample.params, sample.position, self._config.sample_on_device) is None for sample in step.samples)
        drawn = [sample.params.temperature > 0 and self._misfeeds(sample.position) for sample in step.samples]
        misfed = tuple(i for i, wrong in enumerate(drawn) if wrong)
        fed = tuple((record.token_id + wrong) % VOCAB for record, wrong in zip(done.records, drawn, strict=True))
        feeds_next = self._config.run_ahead and chosen
        return FakeStep(replace(done, misfed=misfed if feeds_next else ()), fed, feeds_next, self.result_fails)

    def logits(self, step: Step) -> np.ndarray:
        result = self.step(step)
        return np.stack([np.eye(VOCAB, dtype=np.float32)[record.token_id] for record in result.records])

    def read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
        self._check_thread()
        self.reads.append(tokens)
        layers, heads = LayerRange(0, NUM_LAYERS), HeadRange(0, NUM_HEADS)
        blocks = []
        for index, plane in enumerate(("k", "v")):
            values = np.stack([self._slot(plane, page_table, at) for at in range(tokens.start, tokens.stop)], axis=1)
            if np.isnan(values).any():
                raise RuntimeError(f"read_kv: unwritten slots in {tokens}")
            into = np.empty(values.shape, values.dtype) if out is None else out[index]
            into[...] = values
            blocks.append(KVBlock(plane, layers, tokens, heads, into))
        return tuple(blocks)

    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        self._check_thread()
        self.calls.append("write_kv")
        for offset, at in enumerate(range(block.tokens.start, block.tokens.stop)):
            slot = self._slot(block.plane, page_table, at)
            slot[block.layers.start : block.layers.stop, block.heads.start : block.heads.stop] = block.values[:, offset]

    def copy_page(self, source: int, destination: int) -> None:
        self._check_thread()
        self.copies.append((source, destination))
        for pages in self._pages.values():
            pages[destination] = pages[source]

    def stats(self) -> EngineStats:
        self._check_thread()
        return EngineStats(0, len(self.steps), {"no_device": 1}, {"argmax": self.num_chosen}, graphed_steps=len(self.steps))

    def pages(self, plane: str) -> np.ndarray:
        """The stored pages of a plane, for looking at."""
        return self._pages[plane]

    def _sample(self, table: np.ndarray, length: int, position: int) -> int:
        at = np.arange(length)
        where = table[at // self._config.page_size], at % self._config.page_size
        sums = {plane: pages[where].sum(axis=(1, 2, 3), dtype=np.float64) for plane, pages in self._pages.items()}
        total = position * 17 + float(((at + 1) * (sums["k"] + 2 * sums["v"])).sum())
        if np.isnan(total):
            raise RuntimeError(f"step: read a slot that nobody wrote among {length} positions of pages {table.tolist()}")
        return int(total) % VOCAB

    def _slot(self, plane: str, table: np.ndarray, position: int) -> np.ndarray:
        size = self._config.page_size
        return self._pages[plane][int(table[position // size]), position % size]

    def _check_thread(self) -> None:
        assert self._thread in (None, threading.get_ident()), "the engine was called from another thread than its own"
