"""A whole engine on the device with random weights: decode and prefill steps by the clock, against the measured limits.

A step is timed from its call to its tokens on the host, so planning, launches and sampling are in it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from benchmarks.gpu.findings import Finding, checked
from benchmarks.gpu.limits import Limits, measure
from benchmarks.gpu.models import EngineName, config_of, make_engine, shape_of, spec_of, unexpected_fallbacks
from benchmarks.gpu.sizes import Sizes
from pdd.conform.steps import Row, ScatteredPages, prefill, step_of
from pddbridge.engine import Engine
from pddkernels.shapes import ModelShape
from pddkernels.targets import work

_DTYPE: Final = "bfloat16"
# Root of the mean square, over the logits' own: bfloat16 through all layers leaves a few hundredths, a wrong key or value far more.
_LOGITS_ERROR: Final = 0.1
# Layers are alike. XLA compiles each of them anew for every size of step, which takes minutes for all 32 of the model.
_JAX_LAYERS: Final = 8


def run(name: EngineName, engine_device: str, device: torch.device, sizes: Sizes, threads: int, seed: int) -> list[Finding]:
    """``engine_device``: in the engine's own words · ``device``: the same in torch's, on which limits are measured."""
    limits = measure(device, sizes)
    whole = shape_of(sizes.model)
    num_layers = min(whole.num_layers, _JAX_LAYERS) if name == "jax" else whole.num_layers
    shape = replace(whole, num_layers=num_layers)
    longest = max(context_len + new for context_len, new in sizes.chunks)
    context_tokens = max(longest, sizes.prompt_tokens + sizes.decode_steps * (len(sizes.streams) + 1) + 1)
    step_tokens = max(new for _, new in sizes.chunks)
    spec = spec_of(shape, context_tokens)
    # Each stream has pages for its prompt and for all steps that are timed; the longest chunk has some of its own.
    tokens = max(sizes.streams) * (sizes.prompt_tokens + (len(sizes.streams) + 1) * (sizes.decode_steps + 2)) + longest
    num_pages = -(-tokens // 16) + 2 * max(sizes.streams) + 1
    config = config_of(spec, engine_device, _DTYPE, num_pages, step_tokens, max(sizes.streams), threads)
    began = time.perf_counter()
    engine = make_engine(name, spec, config, seed)
    note = sizes.model if num_layers == whole.num_layers else f"{sizes.model} cut to {num_layers} of {whole.num_layers} layers"
    findings = [Finding("engine made", "measured", note, {"s": time.perf_counter() - began})]
    measuring = _Measuring(engine, shape, limits, sizes, seed)
    findings += [measuring.chunk(context_len, new) for context_len, new in sizes.chunks]
    measuring.fill()
    findings += [measuring.decode(streams) for streams in sizes.streams]
    findings += [measuring.finite_logits(), measuring.same_logits()]
    fallbacks = {reason: times for reason, times in engine.stats().fallbacks.items() if times}
    unexpected = unexpected_fallbacks(name, engine_device, fallbacks)
    findings.append(checked("fallbacks", f"counted {unexpected}" if unexpected else None, note=str(fallbacks or "none")))
    return findings


class _Measuring:
    def __init__(self, engine: Engine, shape: ModelShape, limits: Limits, sizes: Sizes, seed: int) -> None:
        self._engine, self._shape, self._limits, self._sizes = engine, shape, limits, sizes
        self._rng = np.random.default_rng(seed)
        self._pages = ScatteredPages(engine, seed)
        self._chunk_pages = self._pages.take(max(context_len + new for context_len, new in sizes.chunks))
        self._rows: list[np.ndarray] = []
        self._in_kv = sizes.prompt_tokens

    def chunk(self, context_len: int, new: int) -> Finding:
        """A prefill step of one row; the last of its tokens samples."""
        pages = self._chunk_pages
        ids = self._ids(context_len + new)
        prefill(self._engine, ids[:context_len], pages)
        step = step_of(Row(ids[context_len:], context_len, pages))
        seconds = []
        for _ in range(3):  # the first compiles
            began = time.perf_counter()
            self._engine.step(step)
            seconds.append(time.perf_counter() - began)
        todo = work.step([work.Row(context_len, new)], self._shape, 1)
        numbers = {"tokens_s": new / min(seconds), **self._limits.numbers(todo, min(seconds))}
        return Finding(f"prefill of {new:,} after {context_len:,}", "measured", numbers=numbers)

    def fill(self) -> None:
        """The prompt of every stream into KV."""
        room = self._sizes.prompt_tokens + (len(self._sizes.streams) + 1) * (self._sizes.decode_steps + 2)
        for _ in range(max(self._sizes.streams)):
            pages = self._pages.take(room)
            prefill(self._engine, self._ids(self._sizes.prompt_tokens), pages)
            self._rows.append(pages)

    def decode(self, streams: int) -> Finding:
        """Steps of one new token per stream, greedy, each step's tokens the next one's input; the first two are not counted."""
        pending = self._ids(streams)
        seconds = []
        for _ in range(self._sizes.decode_steps + 2):
            step = step_of(*(Row(pending[i : i + 1], self._in_kv, self._rows[i]) for i in range(streams)))
            began = time.perf_counter()
            records = self._engine.step(step).records
            seconds.append(time.perf_counter() - began)
            pending = np.array([record.token_id for record in records], np.int32)
            self._in_kv += 1
        median = statistics.median(seconds[2:])
        todo = work.step([work.Row(self._in_kv - 1, 1)] * streams, self._shape, streams)
        numbers = {"tokens_s": streams / median, **self._limits.numbers(todo, median)}
        return Finding(f"decode, {streams} streams at {self._in_kv - 1:,}", "measured", numbers=numbers)

    def finite_logits(self) -> Finding:
        """Of a step of all streams, every logit."""
        ids = self._ids(len(self._rows))
        logits = self._engine.logits(step_of(*(Row(ids[i : i + 1], self._in_kv, pages) for i, pages in enumerate(self._rows))))
        bad = int((~np.isfinite(logits)).sum())
        spread = float(logits.std(axis=-1).min())
        problem = f"{bad} logits are not finite" if bad else "logits of a row are all the same" if spread == 0 else None
        return checked("logits", problem, {"smallest_spread": spread})

    def same_logits(self) -> Finding:
        """Of a prompt's last token, as the end of a chunk and as a decode row over the chunk's KV."""
        ids, pages = self._ids(self._sizes.prompt_tokens), self._chunk_pages
        chunk = self._engine.logits(step_of(Row(ids, 0, pages)))
        decoded = self._engine.logits(step_of(Row(ids[-1:], len(ids) - 1, pages)))
        error = float(np.sqrt(np.mean((chunk - decoded) ** 2) / np.mean(chunk**2)))
        problem = None if error <= _LOGITS_ERROR else "a decode row's logits are not those of a chunk"
        return checked("logits of a chunk and of a decode row", problem, {"error": error, "allowed": _LOGITS_ERROR})

    def _ids(self, count: int) -> np.ndarray:
        return self._rng.integers(self._shape.vocab_size, size=count).astype(np.int32)
