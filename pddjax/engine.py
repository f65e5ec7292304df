"""The JAX engine: weights, KV pool and compiled programs behind :class:`pddbridge.engine.Engine`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pddbridge.checkpoint import open_checkpoint
from pddbridge.checkpoint_source import ModelTensors
from pddbridge.choice import Choice
from pddbridge.draw_plan import draw_plan
from pddbridge.engine import (
    MAX_SCORED_TOKENS,
    EngineConfig,
    EngineStats,
    KVBlock,
    PendingKV,
    ReadyKV,
    ScoreRow,
    Step,
    StepResult,
    StepUnderWay,
)
from pddbridge.engine_checks import COMPUTE_DTYPES, INT8, check_block, check_config, check_page, check_page_range, check_step
from pddbridge.kv_layout import KVLayout, interleaved_heads
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.model_spec import ModelSpec
from pddbridge.scoring import next_ids
from pddjax.batch import DecodeBatch, RaggedBatch, empty_decode, empty_ragged, pack, pages_per_row
from pddjax.buckets import Buckets, pick
from pddjax.draw import draw, measured_error
from pddjax.fused import FusedFunctions
from pddjax.kv import KVPool, Placement
from pddjax.outcome import JaxStep, Outcome
from pddjax.programs import ModelFunctions, Programs
from pddjax.score import scores_of
from pddjax.sharded import ShardedFunctions, split_over
from pddjax.sharding import TensorParallel
from pddjax.threads import pool_size
from pddjax.weights import load_model
from pddkernels import jax_ops

Functions: TypeAlias = ModelFunctions | FusedFunctions | ShardedFunctions


def create(model_dir: str, config: EngineConfig, choose_ops: Callable[..., jax_ops.JaxOps] = jax_ops.choose) -> JaxEngine:
    """Load the model of ``model_dir`` on ``config.device``: "cpu", or any platform that this JAX knows; over its first ``num_devices``
    devices, as :mod:`pddjax.sharding` splits it.

    ``config.num_threads`` takes effect through :func:`pddjax.threads.environment`, applied before jax was imported; a process where it was
    not shows ``num_threads_not_applied`` among the fallbacks. ``choose_ops``
    takes what :func:`pddkernels.jax_ops.choose` does. Raises ValueError for a config or checkpoint that cannot be served.
    """
    return create_from(open_checkpoint(model_dir), config, choose_ops)


def create_from(checkpoint: ModelTensors, config: EngineConfig, choose_ops: Callable[..., jax_ops.JaxOps] = jax_ops.choose) -> JaxEngine:
    """As :func:`create`, of a checkpoint that is open already, or of weights that are in no file."""
    check_config(config, checkpoint.spec, (*COMPUTE_DTYPES, INT8))
    if config.decode_graphs:
        raise ValueError("decode_graphs: given True, allowed False: this engine compiles whole steps")
    _configure_jax(config)
    devices = _devices(config)
    int8 = config.compute_dtype == INT8
    dtype, kv_dtype = jnp.dtype("bfloat16" if int8 else config.compute_dtype), jnp.dtype(_kv_spec(checkpoint.spec, config).np_dtype)
    local = TensorParallel(checkpoint.spec, config.num_devices).local
    ops = choose_ops(
        devices[0],
        num_heads=local.num_heads,
        kv_heads=local.num_kv_heads,
        head_dim=local.head_dim,
        kv_dtype=kv_dtype,
        max_rows=config.max_rows,
        pages_per_row=pages_per_row(config),
        cache_dir=config.compile_cache_dir,
    )
    if config.num_devices == 1:
        model = load_model(checkpoint, dtype, config.max_context_tokens, devices[0], ops.product, int8)
        whole_layers, ops = ops.for_layers(dtype)
        functions: Functions = FusedFunctions(model, devices[0]) if whole_layers else ModelFunctions(model, ops)
        placement = Placement.on_one(devices[0], ops)
    else:
        functions, placement = split_over(devices, checkpoint, dtype, ops, config.max_context_tokens, int8)
    return JaxEngine(checkpoint.spec, config, checkpoint.weights_digest(), functions, placement)


class JaxEngine:
    """Implements :class:`pddbridge.engine.Engine`; made by :func:`create`."""

    def __init__(
        self,
        spec: ModelSpec,
        config: EngineConfig,
        weights_digest: str,
        functions: Functions,
        placement: Placement,
    ) -> None:
        self._spec, self._config, self._weights_digest = spec, config, weights_digest
        self._functions = functions
        self._buckets = Buckets.up_to(config.max_rows, config.max_step_tokens)
        self._programs = Programs()
        self._kv_spec = _kv_spec(spec, config)
        self._ops = placement.ops
        self._pool = KVPool(config, self._kv_spec, placement, self._programs)
        self._num_steps = 0
        self._chosen: Counter[str] = Counter()
        self._draw_error = measured_error(_devices(config)[0]) if config.sample_on_device else 0.0
        threads = pool_size() if config.device == "cpu" else None
        self._fallbacks = {"num_threads_not_applied": int(threads is not None and threads != config.num_threads)}
        self._fallbacks |= dict.fromkeys(placement.ops.fallbacks, 1)

    @property
    def name(self) -> str:
        return "jax"

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def kv_spec(self) -> KVSpec:
        return self._kv_spec

    @property
    def layout(self) -> KVLayout:
        return interleaved_heads(self._config.page_size, self._config.kv_dtype)

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def weights_digest(self) -> str:
        return self._weights_digest

    def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
        """Compile every bucket and run it on padding. The largest come first, so that memory runs out at once or not at all."""
        ragged = [(f"step of {n} tokens", partial(self._forward, empty_ragged(self._config, n, self._ops))) for n in self._buckets.tokens]
        decode = [(f"decode of {n} rows", partial(self._forward, empty_decode(self._config, n))) for n in self._buckets.rows]
        heads = [(f"logits of {n} rows", partial(self._warm_up_head, n)) for n in self._buckets.rows]
        work: list[tuple[str, Callable[[], object]]] = [*reversed(ragged), *reversed(decode), *reversed(heads)]
        if self._config.sample_on_device:
            work.extend((f"draws of {n} rows", partial(self._warm_up_draw, n)) for n in reversed(self._buckets.rows))
        work.append(("scores", self._warm_up_scores))
        work.append(("KV read, write and copy", self._pool.warm_up))
        for done, (what, run) in enumerate(work, 1):
            jax.block_until_ready(run())
            progress(done, len(work), what)

    def step(self, step: Step) -> StepResult:
        """See :meth:`pddbridge.engine.Engine.step`."""
        return self.start_step(step).result()

    def start_step(self, step: Step, after: StepUnderWay | None = None) -> JaxStep:
        """See :meth:`pddbridge.engine.RunsAhead.start_step`."""
        hidden, outcome = self._start(step, after)
        num_samples = 0 if outcome is None else outcome.logits.shape[1]
        choice = Choice.of(step.samples, self._config.sample_on_device, self._spec.vocab_size, self._draw_error, num_samples)
        if outcome is not None:
            outcome = self._choose(outcome, choice)
            outcome.copy_to_host_async()
        scores = self._start_scores(hidden, step.scores)
        ahead = choice.all_on_device and self._config.run_ahead
        one_row = self._one_row if self._config.sample_on_device else None
        return JaxStep(step, choice, hidden, outcome, scores, ahead, one_row, self._chosen)

    def logits(self, step: Step) -> np.ndarray:
        """See :meth:`pddbridge.engine.Engine.logits`."""
        _, outcome = self._start(step)
        if outcome is None:
            return np.zeros((0, self._spec.vocab_size), np.float32)
        return np.ascontiguousarray(np.asarray(outcome.logits)[:, : len(step.samples)].T)

    def read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
        """See :meth:`pddbridge.engine.Engine.read_kv`."""
        check_page_range(page_table, tokens, self._config)
        return self._pool.read(page_table, tokens, out)

    def start_read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> PendingKV:
        """See :meth:`pddbridge.engine.OverlapsReads.start_read_kv`. On a CPU a copy is compute like any other, so it is done at once."""
        if self._config.device == "cpu":
            return ReadyKV(self.read_kv(page_table, tokens, out))
        check_page_range(page_table, tokens, self._config)
        return self._pool.start_read(page_table, tokens, out)

    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        """See :meth:`pddbridge.engine.Engine.write_kv`."""
        check_page_range(page_table, block.tokens, self._config)
        check_block(block, self._kv_spec)
        self._pool.write(page_table, block)

    def copy_page(self, source: int, destination: int) -> None:
        """See :meth:`pddbridge.engine.Engine.copy_page`."""
        check_page("source", source, self._config)
        check_page("destination", destination, self._config)
        self._pool.copy_page(source, destination)

    def stats(self) -> EngineStats:
        """Compilations are exact: see :class:`pddjax.programs.Programs`."""
        return EngineStats(self._programs.compilations, self._num_steps, dict(self._fallbacks), dict(self._chosen))

    def _start(self, step: Step, after: StepUnderWay | None = None) -> tuple[jax.Array, Outcome | None]:
        """Dispatch a step: its hidden states, and what its samples are chosen from, None if no row samples."""
        check_step(step, self._config, self._spec.vocab_size, after)
        batch = pack(step, self._config, self._buckets, self._ops)
        if after is not None:
            if not isinstance(after, JaxStep) or after.outcome is None or len(after.step.samples) != len(step.context_lens):
                raise ValueError("after: given another step than the one that was started last, or one with other rows")
            batch = batch._replace(token_ids=after.outcome.ids)  # the same bucket: as many rows as samples
        hidden = self._forward(batch)
        self._num_steps += 1
        if not step.samples:
            return hidden, None
        return hidden, Outcome(*self._head(hidden, pick(self._buckets.rows, len(step.samples))), None)

    def _choose(self, outcome: Outcome, choice: Choice) -> Outcome:
        """With what ``choice`` has the device draw, drawn."""
        if choice.arrays is None:
            return outcome
        arguments = (outcome.logits, outcome.highest, outcome.ids, choice.arrays)
        program = self._programs.get("draw", outcome.logits.shape[1], draw, None, arguments, x64=True)
        ids, margins = program(*arguments)
        # As the next step takes them, which is compiled for where the head leaves its ids; a copy only if the compiler put these elsewhere.
        return outcome._replace(ids=jax.device_put(ids, outcome.ids.sharding), margins=margins)

    def _one_row(self, logits: jax.Array, row: int) -> jax.Array:
        def column(logits: jax.Array, row: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(logits, row, axis=1, keepdims=False)

        arguments = (logits, np.int32(row))
        one: jax.Array = self._programs.get("one row", logits.shape[1], column, None, arguments)(*arguments)
        return one

    def _start_scores(self, hidden: jax.Array, rows: tuple[ScoreRow, ...]) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        if not rows:
            return None
        follows = next_ids(rows)
        return self._score(hidden, np.pad(follows, (0, MAX_SCORED_TOKENS - len(follows))))

    def _score(self, hidden: jax.Array, follows: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
        first = self._config.max_rows

        def score(leaves: tuple[jax.Array, ...], hidden: jax.Array, follows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            logits, highest, _ = self._functions.head(leaves, hidden[:, first:], MAX_SCORED_TOKENS)
            return scores_of(logits, highest, follows)

        arguments = (self._functions.leaves, hidden, follows)
        return self._programs.get("score", MAX_SCORED_TOKENS, score, None, arguments)(*arguments)

    def _warm_up_scores(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self._score(self._forward(empty_decode(self._config, 1)), np.zeros(MAX_SCORED_TOKENS, np.int32))

    def _forward(self, batch: DecodeBatch | RaggedBatch) -> jax.Array:
        arguments = (self._functions.leaves, self._pool.pages, batch)
        size = len(batch.token_ids)
        if isinstance(batch, DecodeBatch):
            program = self._programs.get("decode", size, self._functions.decode, 1, arguments)
        else:
            program = self._programs.get("ragged", size, self._functions.ragged, 1, arguments)
        hidden, self._pool.pages = program(*arguments)
        return hidden

    def _warm_up_head(self, num_samples: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self._head(self._forward(empty_decode(self._config, 1)), num_samples)

    def _warm_up_draw(self, num_samples: int) -> tuple[Outcome, jax.Array]:
        """Nothing of it is drawn, by the same program that draws."""
        outcome = Outcome(*self._warm_up_head(num_samples), None)
        nothing = draw_plan((), (), self._spec.vocab_size, 0.0, num_samples)
        return self._choose(outcome, Choice((), (), nothing)), self._one_row(outcome.logits, 0)

    def _head(self, hidden: jax.Array, num_samples: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        def head(leaves: tuple[jax.Array, ...], hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            logits, highest, ids = self._functions.head(leaves, hidden, num_samples)
            # Where there is no maximum (padding, a broken model) the id may still be the next step's token.
            return logits, highest, jnp.clip(ids, 0, self._spec.vocab_size - 1)

        arguments = (self._functions.leaves, hidden)
        return self._programs.get("head", num_samples, head, None, arguments)(*arguments)


def _kv_spec(spec: ModelSpec, config: EngineConfig) -> KVSpec:
    return KVSpec.gqa(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.kv_dtype)


def _configure_jax(config: EngineConfig) -> None:
    """Process-wide settings of jax; they must precede its first computation."""
    if config.compile_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", config.compile_cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _devices(config: EngineConfig) -> list[jax.Device]:
    """The first ``num_devices`` of ``device``."""
    try:
        found: list[jax.Device] = jax.devices(config.device)
    except RuntimeError as error:
        raise ValueError(f"device: given {config.device!r}: {' '.join(str(error).split())}") from error
    if len(found) < config.num_devices:
        raise ValueError(f"num_devices: given {config.num_devices}, {config.device} has {len(found)}")
    return found[: config.num_devices]
