"""A measuring child of ``pdd bench hits``: a worker's executor over one engine, in a process of its own. Composition root.

python -m pdd.bench.hits_child --engine jax|torch --dtype D --kv-dtype D --threads N --model-dir DIR --cache-dir DIR
    --prompts N,N,... --step-tokens N --seed N

Scheduler, prefix cache, chunks and buckets are a worker's: commands go to :class:`pdd.worker.executor.Executor`, and steps are run until
every prompt is reported. Answers on the stdout it was started with; whatever libraries print goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from pdd.worker import messages as m
from pdd.worker.executor import Executor, ExecutorLimits
from pddbridge.checkpoint import open_checkpoint
from pddbridge.engine import Engine, EngineConfig, EngineFactory, KVBlock
from pddbridge.kv_spec import TokenRange
from pddbridge.sampling_params import SamplingParams

_PAGE_SIZE = 16
_TENANT = "bench"
_GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
_NEVER = float("inf")


class Mix:
    """Prompts of fixed lengths that come at once. Their KV was computed once and is kept on the host, so that a cache is filled by placing
    it, as KV from another worker is, and every point begins with a fresh executor.
    """

    def __init__(self, engine: Engine, lengths: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._engine = engine
        self._vocab_size = engine.spec.vocab_size
        self._prompts = [rng.integers(0, self._vocab_size, length).tolist() for length in lengths]
        self._kv = [self._compute(prompt) for prompt in self._prompts]

    def prefill(self, rate: int) -> dict[str, object]:
        """Everything about one point: seconds of the wall and of all the process's threads, tokens, steps."""
        run = _Run(self._engine)
        for index, prompt in enumerate(self._prompts):
            hit = len(prompt) * rate // 100
            if hit:
                # The cached prompt goes on otherwise inside the page, so that the hit is exact and its last page is copied.
                longer = self._longer(prompt)
                other = [(token + 1) % self._vocab_size for token in longer[hit : _end_of_page(hit) + 1]]
                run.place(f"prime-{index}", [*prompt[:hit], *other], self._kv[index])
        began, cpu_began = time.perf_counter(), time.process_time()
        for index, prompt in enumerate(self._prompts):
            run.open(f"p{index}", prompt)
        steps = run.until_prefilled(len(self._prompts))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "prompt_tokens": sum(len(prompt) - 1 for prompt in self._prompts),
            "computed_tokens": run.computed,
            "steps": steps,
        }

    def _compute(self, prompt: list[int]) -> tuple[KVBlock, ...]:
        run = _Run(self._engine)
        run.open("base", self._longer(prompt), push_to=(m.PushTo("host", 0),))
        run.until_prefilled(1)
        run.finish_reads()
        return tuple(replace(block, values=block.values.copy()) for block in run.read)

    def _longer(self, prompt: list[int]) -> list[int]:
        """``prompt`` and as much as fills its last page, and a token that is computed by nobody."""
        return [*prompt, *prompt[: _end_of_page(len(prompt)) + 1 - len(prompt)]]


class _Run:
    """One executor's life: requests in, steps until they are reported."""

    def __init__(self, engine: Engine) -> None:
        self.computed = 0
        self.read: list[KVBlock] = []
        self._prefilled = 0
        self._executor = Executor(engine, self._emit, limits=ExecutorLimits(push_window_bytes=2**40))

    def open(self, request_id: str, prompt: list[int], *, transfer: bool = False, push_to: tuple[m.PushTo, ...] = ()) -> None:
        self._executor.handle(m.OpenRequest(request_id, _TENANT, tuple(prompt), (), _GREEDY, transfer, False, None, push_to, _NEVER))

    def place(self, request_id: str, prompt: list[int], blocks: tuple[KVBlock, ...]) -> None:
        """Fill the cache with ``prompt``, whose KV is the beginning of ``blocks``."""
        self.open(request_id, prompt, transfer=True)
        for block in blocks:
            if block.tokens.start >= len(prompt) - 1:
                continue
            placed: Future[None] = Future()
            tokens = TokenRange(block.tokens.start, min(block.tokens.stop, len(prompt) - 1))
            part = replace(block, tokens=tokens, values=np.ascontiguousarray(block.values[:, : tokens.stop - tokens.start]))
            self._executor.handle(m.PlaceKV(request_id, part, placed))
            placed.result(timeout=0)
        self._executor.handle(m.TransferComplete(request_id, 0, 0))
        closed: Future[None] = Future()
        self._executor.handle(m.CloseRequest(request_id, closed))
        closed.result(timeout=0)

    def until_prefilled(self, count: int) -> int:
        """Number of steps."""
        steps = 0
        while self._prefilled < count:
            self._executor.admit_waiting()
            if not self._executor.run_step():
                raise ValueError(f"bench hits: {count - self._prefilled} prompts stand still")
            steps += 1
        return steps

    def finish_reads(self) -> None:
        """Take what is still on its way to the host into ``read``."""
        while self._executor.run_step():
            pass

    def _emit(self, request_id: str, event: m.Event) -> None:
        match event:
            case m.Prefilled():
                self._prefilled += 1
                self.computed += event.computed_tokens
            case m.KVRead():
                self.read += event.blocks
            case m.Failed() | m.Refused():
                raise ValueError(f"bench hits: {request_id}: {event.message}")
            case _:
                pass


def _end_of_page(position: int) -> int:
    return -(-position // _PAGE_SIZE) * _PAGE_SIZE


def main() -> None:
    parser = argparse.ArgumentParser(prog="pdd.bench.hits_child")
    parser.add_argument("--engine", choices=("jax", "torch"), required=True)
    for option in ("--dtype", "--kv-dtype", "--model-dir", "--cache-dir", "--prompts"):
        parser.add_argument(option, required=True)
    for option in ("--threads", "--step-tokens", "--seed"):
        parser.add_argument(option, type=int, required=True)
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        mix = _mix(given)
    except (ValueError, OSError, ImportError) as error:
        answers.write(json.dumps({"error": " ".join(str(error).split())}) + "\n")
        sys.exit(1)
    answers.write(json.dumps({"ready": given.engine}) + "\n")
    for line in sys.stdin:
        try:
            answer = mix.prefill(json.loads(line)["rate"])
        except ValueError as error:
            answer = {"error": " ".join(str(error).split())}
        answers.write(json.dumps(answer) + "\n")


def _mix(given: argparse.Namespace) -> Mix:
    lengths = [int(length) for length in given.prompts.split(",")]
    os.environ.update(importlib.import_module(f"pdd{given.engine}.threads").environment(given.threads))
    pages = [-(-length // _PAGE_SIZE) + 1 for length in lengths]
    config = EngineConfig(
        device="cpu",
        compute_dtype=given.dtype,
        kv_dtype=given.kv_dtype,
        page_size=_PAGE_SIZE,
        num_pages=2 * sum(pages) + len(lengths),  # what is cached, as much again for the prompts, and a page of growth each
        max_context_tokens=min(max(lengths) + 2 * _PAGE_SIZE, open_checkpoint(given.model_dir).spec.max_context_tokens),
        max_step_tokens=given.step_tokens,
        max_rows=len(lengths),
        num_threads=given.threads,
        compile_cache_dir=os.path.join(given.cache_dir, "compiled", given.engine),
    )
    create: EngineFactory = importlib.import_module(f"pdd{given.engine}.engine").create
    engine = create(given.model_dir, config)
    engine.warm_up(lambda done, total, what: None)
    return Mix(engine, lengths, given.seed)


if __name__ == "__main__":
    main()
