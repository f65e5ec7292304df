"""A measuring child of ``pdd bench engine``: one engine, or Hugging Face's generate, in a process of its own. Composition root.

python -m pdd.bench.engine_child --subject jax|torch|hf --dtype D --kv-dtype D --threads N --model-dir DIR --max-context N --max-streams N
    --step-tokens N

Answers on the stdout it was started with; whatever libraries print goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time

import numpy as np

from pdd.bench.engine_subject import Limits, Subject
from pddbridge.checkpoint import open_checkpoint
from pddbridge.engine import Engine, EngineConfig, EngineFactory, SampleRow, Step
from pddbridge.sampling_params import SamplingParams

_PAGE_SIZE = 16
_NO_IDS = np.zeros(0, np.int32)
_GREEDY = SamplingParams(seed=0, max_tokens=1_000_000, temperature=0.0)


class EngineSubject:
    """An engine driven through its contract, as a worker's step thread does: prompts in chunks, then one token per row and step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pages_per_row = -(-engine.config.max_context_tokens // _PAGE_SIZE)
        self._filled: dict[int, int] = {}  # row -> tokens in its KV
        self._rng = np.random.default_rng(0)

    def prefill(self, num_tokens: int) -> float:
        return self._fill(0, num_tokens)

    def decode(self, streams: int, context: int, steps: int) -> float:
        for row in range(streams):
            if self._filled.get(row) != context:
                self._fill(row, context)
        tables = np.stack([self._table(row) for row in range(streams)])
        token_ids = self._ids(streams)
        starts = np.arange(streams + 1, dtype=np.int32)
        log = np.zeros(steps, np.int32)  # greedy rows do not look at it
        began = time.perf_counter()
        for step in range(steps):
            samples = tuple(SampleRow(row, step, _GREEDY, _NO_IDS, log[:step]) for row in range(streams))
            result = self._engine.step(Step(token_ids, starts, np.full(streams, context + step, np.int32), tables, samples))
            token_ids = np.array([record.token_id for record in result.records], np.int32)
        return time.perf_counter() - began

    def _fill(self, row: int, num_tokens: int) -> float:
        """Compute ``num_tokens`` of ``row`` from the start, and its next token. Seconds."""
        table, token_ids = self._table(row)[None], self._ids(num_tokens)
        sample = (SampleRow(0, 0, _GREEDY, token_ids, _NO_IDS),)
        chunk = self._engine.config.max_step_tokens
        began = time.perf_counter()
        for start in range(0, num_tokens, chunk):
            new = token_ids[start : start + chunk]
            samples = sample if start + chunk >= num_tokens else ()
            self._engine.step(Step(new, np.array([0, len(new)], np.int32), np.array([start], np.int32), table, samples))
        seconds = time.perf_counter() - began
        self._filled[row] = num_tokens
        return seconds

    def _table(self, row: int) -> np.ndarray:
        return np.arange(row * self._pages_per_row, (row + 1) * self._pages_per_row, dtype=np.int32)

    def _ids(self, count: int) -> np.ndarray:
        return self._rng.integers(0, self._engine.spec.vocab_size, count, dtype=np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(prog="pdd.bench.engine_child")
    parser.add_argument("--subject", choices=("jax", "torch", "hf"), required=True)
    for option in ("--dtype", "--kv-dtype", "--model-dir", "--cache-dir"):
        parser.add_argument(option, required=True)
    for option in ("--threads", "--max-context", "--max-streams", "--step-tokens"):
        parser.add_argument(option, type=int, required=True)
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        subject = _subject(given)
    except (ValueError, OSError, ImportError) as error:
        answers.write(json.dumps({"error": " ".join(str(error).split())}) + "\n")
        sys.exit(1)
    answers.write(json.dumps({"ready": given.subject}) + "\n")
    for line in sys.stdin:
        try:
            answer = _answer(subject, json.loads(line))
        except ValueError as error:
            answer = {"error": " ".join(str(error).split())}
        answers.write(json.dumps(answer) + "\n")


def _answer(subject: Subject, question: dict[str, object]) -> dict[str, object]:
    match question:
        case {"phase": "prefill", "context": int(context)}:
            return {"seconds": subject.prefill(context)}
        case {"phase": "decode", "streams": int(streams), "context": int(context), "steps": int(steps)}:
            return {"seconds": subject.decode(streams, context, steps)}
        case {"phase": "limits"}:
            limits: Limits = Limits(*importlib.import_module("pddtorch.limits").measure())
            return {"read_bytes_s": limits.read_bytes_s, "flops_s": dict(limits.flops_s)}
        case _:
            return {"error": f"unknown question {question}"}


def _subject(given: argparse.Namespace) -> Subject:
    engine = "torch" if given.subject == "hf" else given.subject
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.update(importlib.import_module(f"pdd{engine}.threads").environment(given.threads, spin=True))
    if given.subject == "hf":
        subject: Subject = importlib.import_module("pddtorch.hf_generate").HfGenerate(given.model_dir, given.dtype, given.threads)
        return subject
    context = min(given.max_context, open_checkpoint(given.model_dir).spec.max_context_tokens)
    config = EngineConfig(
        device="cpu",
        compute_dtype=given.dtype,
        kv_dtype=given.kv_dtype,
        page_size=_PAGE_SIZE,
        num_pages=given.max_streams * -(-context // _PAGE_SIZE),
        max_context_tokens=context,
        max_step_tokens=given.step_tokens,
        max_rows=given.max_streams,
        num_threads=given.threads,
        compile_cache_dir=os.path.join(given.cache_dir, "compiled", given.subject),
    )
    create: EngineFactory = importlib.import_module(f"pdd{given.subject}.engine").create
    made = create(given.model_dir, config)
    made.warm_up(lambda done, total, what: None)
    return EngineSubject(made)


if __name__ == "__main__":
    main()
