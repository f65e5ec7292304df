"""The contract that both engines fulfil. An engine knows tensors and pages; it knows no roles, no requests, no network.

One ragged batch serves every phase: a prefill chunk is a row with many new tokens, an extend row has a few, a decode row has one.
All calls come from one thread, the worker's step thread. Arrays are numpy, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from pddbridge.kv_layout import KVLayout
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.model_spec import ModelSpec
from pddbridge.sampling_params import SamplingParams, TokenRecord


@dataclass(frozen=True)
class EngineConfig:
    """What a composition root decides for an engine.

    ``compute_dtype``: "float32" (exact tests, and fastest for JAX on a CPU), "bfloat16", or "int8" where an engine
    has it: bfloat16 with weights in int8. ``max_step_tokens`` bounds T,
    ``max_rows`` bounds R of any step; compiled shapes come from buckets up to them. ``compile_cache_dir``: where compiled
    programs survive a restart, None for nowhere. ``num_devices``: over how many of ``device`` the model and its KV are split, by heads;
    what is read and written through the contract is the same for any number. ``run_ahead``: whether a step says ``feeds_next``; of use
    where the device computes while the host waits. ``sample_on_device``: whether the device draws what has a temperature and needs no more
    than its logits (:mod:`pddbridge.draw_plan`); it always chooses what is plainly greedy. ``decode_graphs``: whether steps of decode rows
    are recorded when the engine warms up and replayed from then on, for PyTorch on a CUDA device.
    """

    device: str
    compute_dtype: str
    kv_dtype: str
    page_size: int
    num_pages: int
    max_context_tokens: int
    max_step_tokens: int
    max_rows: int
    num_threads: int
    compile_cache_dir: str | None
    num_devices: int = 1
    run_ahead: bool = False
    sample_on_device: bool = False
    decode_graphs: bool = False


@dataclass(frozen=True)
class SampleRow:
    """Row ``row`` of the step samples log position ``position``.

    ``prompt_ids`` [n] i32 and ``log_ids`` [position] i32 are what the penalties look at.
    """

    row: int
    position: int
    params: SamplingParams
    prompt_ids: np.ndarray
    log_ids: np.ndarray


# Scored tokens of one step: each needs logits over the whole vocabulary.
MAX_SCORED_TOKENS = 64
# The most likely tokens beside each scored one.
MAX_SCORE_LOGPROBS = 20


@dataclass(frozen=True)
class ScoreRow:
    """The log-probabilities of what follows the first new tokens of row ``row``: its new token i is followed by ``next_ids[i]``.

    ``next_ids`` [1 to the row's new tokens] i32 · ``num_logprobs``: how many of the most likely tokens to report as well.
    """

    row: int
    next_ids: np.ndarray
    num_logprobs: int


@dataclass(frozen=True)
class Step:
    """One ragged batch of R rows and T new tokens.

    ``token_ids`` [T] i32, rows back to back · ``row_starts`` [R+1] i32 · ``context_lens`` [R] i32, tokens already in KV, so new
    token i of row r stands at position ``context_lens[r] + i`` and attends to itself and everything before ·
    ``page_tables`` [R, P] i32, token position t of row r lives in page ``page_tables[r, t // page_size]``, slot ``t % page_size``;
    entries past what the row needs are 0 and never read or written · ``samples``: rows whose last new token's logits choose a token ·
    ``scores``: rows whose given tokens are scored, up to ``MAX_SCORED_TOKENS`` of them in all.

    Slots past ``context_lens[r] + new`` may hold anything (NaN included) and must not influence a result. Rows may share pages before their
    ``context_lens``; pages that are written belong to one row.
    """

    token_ids: np.ndarray
    row_starts: np.ndarray
    context_lens: np.ndarray
    page_tables: np.ndarray
    samples: tuple[SampleRow, ...]
    scores: tuple[ScoreRow, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """One record per entry of ``Step.samples``, in its order; and per entry of ``Step.scores`` a record of each of its ``next_ids``.

    ``misfed``: of a step with ``feeds_next`` the samples whose record has another token than the device goes on with: it was in doubt, and
    the host's stands. Their rows of a step that was started after this one mean nothing.
    """

    records: tuple[TokenRecord, ...]
    scores: tuple[tuple[TokenRecord, ...], ...] = ()
    misfed: tuple[int, ...] = ()


class StepUnderWay(Protocol):
    """A step that the device was told to run."""

    @property
    def feeds_next(self) -> bool:
        """Whether the device itself chooses every sample, so that the next step can be started before anybody has seen them."""

    def result(self) -> StepResult:
        """Wait for it. Called once, or never. Raises what ``Engine.step`` does."""


@dataclass(frozen=True)
class StepDone:
    """A :class:`StepUnderWay` that is not, any more."""

    done: StepResult
    feeds_next: bool = False

    def result(self) -> StepResult:
        return self.done


@dataclass(frozen=True)
class KVBlock:
    """A rectangle of one plane in wire order: ``values`` [layers, tokens, heads, dim] in the spec's KV dtype, C-contiguous."""

    plane: str
    layers: LayerRange
    tokens: TokenRange
    heads: HeadRange
    values: np.ndarray


@dataclass(frozen=True)
class EngineStats:
    """Counters since construction. ``compilations`` counts traced-and-compiled programs and recorded steps (0 for engines that compile and
    record nothing). ``graphed_steps``: those of ``steps`` that replayed a recorded one.

    ``chosen``: sampled tokens by who chose them: "argmax" and "drawn" on the device, "host_" and why not: "off", or what was asked for
    ("record", "penalties", "bias", "mask", "temperature"), or "doubt", which rounding left.
    """

    compilations: int
    steps: int
    fallbacks: dict[str, int]
    chosen: dict[str, int] = field(default_factory=dict)
    graphed_steps: int = 0


class PendingKV(Protocol):
    """KV on its way to the host."""

    @property
    def ready(self) -> bool:
        """Whether ``blocks`` returns without waiting."""

    def blocks(self) -> tuple[KVBlock, ...]:
        """Wait for the copy; as ``Engine.read_kv``. Called once, or never."""


@dataclass(frozen=True)
class ReadyKV:
    """A :class:`PendingKV` that is there already."""

    values: tuple[KVBlock, ...]
    ready: bool = True

    def blocks(self) -> tuple[KVBlock, ...]:
        return self.values


class Engine(Protocol):
    """See the module docstring. Construction loads weights; ``warm_up`` compiles every bucket."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def kv_spec(self) -> KVSpec: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def weights_digest(self) -> str: ...

    def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
        """Compile and run every bucket once. ``progress(done, total, what)`` is called after each."""

    def step(self, step: Step) -> StepResult:
        """Run one step. Writes the new tokens' KV, samples where asked. Raises ValueError if the step breaks the contract."""

    def logits(self, step: Step) -> np.ndarray:
        """As ``step`` but returns float32 logits [len(samples), vocab] of the sampling rows instead of tokens (conformance, audits)."""

    def read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
        """Copy the KV of ``tokens`` out of the pages of ``page_table`` [P] i32: one block per plane, all layers, all heads.

        ``out``: the blocks' values, [layers, tokens, heads, dim] each, as :func:`pddbridge.kv_block.arrays_in` lays them: memory of a
        link, which then copies nothing. An engine whose device cannot write there returns other arrays, and the link copies. Raises
        ValueError for an ``out`` of another form.
        """

    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        """Place a block into the pages of ``page_table`` [P] i32; touches nothing outside the block's ranges.

        Once it returns, the block's values are not read any more: they may lie in memory that is used again.
        """

    def copy_page(self, source: int, destination: int) -> None:
        """Copy all slots of page ``source`` to page ``destination`` (copy-on-write inside a page)."""

    def stats(self) -> EngineStats: ...


@runtime_checkable
class OverlapsReads(Protocol):
    """What an engine adds if its device can copy to the host while it computes. An engine without it is read with ``read_kv``."""

    def start_read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> PendingKV:
        """As ``read_kv``, but return as soon as the copy is under way.

        The values are those of the time of this call: later calls of the engine may write the same pages at once and do not wait for
        ``blocks``; the engine orders them behind the copy, or copies from where they do not write.
        """


def start_read_kv(engine: Engine, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> PendingKV:
    """Begin to copy KV to the host, beside the compute that follows where ``engine`` can."""
    if isinstance(engine, OverlapsReads):
        return engine.start_read_kv(page_table, tokens, out)
    return ReadyKV(engine.read_kv(page_table, tokens, out))


@runtime_checkable
class RunsAhead(Protocol):
    """What an engine adds if it returns from starting a step before the step is done: its device then need not wait for the host between
    two steps.
    """

    def start_step(self, step: Step, after: StepUnderWay | None = None) -> StepUnderWay:
        """As ``Engine.step``, but return as soon as the device was told. Steps, and all other calls, take effect in the order of the calls.

        ``after``: the step that was started last, with ``feeds_next``. Then ``step`` has a row for each of its samples, in their order,
        with the one new token that the sample chooses, whatever ``token_ids`` says; ``log_ids`` of its own samples, all of which the
        device must choose (:func:`pddbridge.choice.why_on_host`), lack that token. Raises ValueError for a step that breaks this.
        """


def start_step(engine: Engine, step: Step, after: StepUnderWay | None = None) -> StepUnderWay:
    """Begin ``step``. An engine that does not run ahead has done it on return."""
    return engine.start_step(step, after) if isinstance(engine, RunsAhead) else StepDone(engine.step(step))


class EngineFactory(Protocol):
    """``pddjax.engine:create`` and ``pddtorch.engine:create``: what a worker calls after choosing an engine by name."""

    def __call__(self, model_dir: str, config: EngineConfig) -> Engine: ...
