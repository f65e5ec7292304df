"""Drives a worker's executor by hand: commands in, steps until nothing moves, events out, the ledger checked all along."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

from pdd.worker import messages as m
from pdd.worker.executor import Executor, ExecutorLimits
from pddbridge.engine import Engine, KVBlock
from pddbridge.sampling_params import SamplingParams
from tests.support.fake_engine import FakeEngine

E = TypeVar("E")

PROMPT = list(range(40, 63))  # 23 tokens: two pages of 8 and a tail


class ExecutorDriver:
    def __init__(self, engine: Engine, use_prefix_cache: bool = True, limits: ExecutorLimits | None = None) -> None:
        self.engine = engine
        self.events: dict[str, list[m.Event]] = {}
        self.executor = Executor(engine, self._emit, use_prefix_cache, limits or ExecutorLimits())

    def open(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        log: Sequence[int] = (),
        max_tokens: int = 8,
        transfer: bool = False,
        decode: bool = True,
        limit: int | None = None,
        push_to: Sequence[m.PushTo] = (),
        tenant: str = "t",
        deadline: float = 1e9,
        params: SamplingParams | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        params = params or SamplingParams(seed=1, max_tokens=max_tokens)
        command = m.OpenRequest(
            request_id, tenant, tuple(prompt), tuple(log), params, transfer, decode, limit, tuple(push_to), deadline, prompt_logprobs
        )
        self.executor.handle(command)
        self.executor.check()

    def ingest(self, request_id: str, position: int, token_ids: Sequence[int], decode: bool) -> None:
        self.executor.handle(m.IngestTokens(request_id, position, tuple(token_ids), decode))

    def seal(self, request_id: str) -> None:
        self.executor.handle(m.SealRequest(request_id))

    def close(self, request_id: str) -> None:
        done: Future[None] = Future()
        self.executor.handle(m.CloseRequest(request_id, done))
        done.result(timeout=0)
        self.executor.check()

    def place(self, request_id: str, blocks: Sequence[KVBlock]) -> None:
        for block in blocks:
            done: Future[None] = Future()
            self.executor.handle(m.PlaceKV(request_id, block, done))
            done.result(timeout=0)

    def step(self) -> bool:
        """One turn of the step loop, without a clock."""
        self.executor.admit_waiting()
        stepped = self.executor.run_step()
        self.executor.check()
        return stepped

    def run(self, max_steps: int = 500) -> int:
        """Steps until no row can run; returns how many."""
        for steps in range(max_steps):
            if not self.step():
                return steps
        raise AssertionError(f"still running after {max_steps} steps")

    def snapshot(self) -> m.Snapshot:
        reply: Future[m.Snapshot] = Future()
        self.executor.handle(m.TakeSnapshot(reply))
        return reply.result(timeout=0)

    def of(self, request_id: str, kind: type[E]) -> list[E]:
        return [event for event in self.events.get(request_id, []) if isinstance(event, kind)]

    def kinds(self, request_id: str) -> list[str]:
        return [type(event).__name__ for event in self.events.get(request_id, [])]

    def log(self, request_id: str) -> list[int]:
        """Proposed tokens, which must come at consecutive positions."""
        ids: list[int] = []
        first: int | None = None
        for event in self.of(request_id, m.Tokens):
            first = event.position if first is None else first
            assert event.position == first + len(ids)
            ids += [record.token_id for record in event.records]
        return ids

    def assert_idle(self) -> None:
        snapshot = self.snapshot()
        pages = snapshot.pages
        assert (pages.pinned, snapshot.num_requests) == (0, 0)
        assert pages.free + pages.cached == pages.total

    def _emit(self, request_id: str, event: m.Event) -> None:
        self.events.setdefault(request_id, []).append(event)


def transferred(prompt: list[int], start: int = 0) -> ExecutorDriver:
    """A prefill worker that has ``prompt`` computed and read for a receiver that lacks it from ``start`` on."""
    driver = ExecutorDriver(FakeEngine(page_size=12))
    driver.open("p", prompt, decode=False, push_to=[m.PushTo("main", start)])
    driver.run()
    return driver


def move(sender: ExecutorDriver, receiver: ExecutorDriver, request_id: str) -> None:
    num_bytes = 0
    for read in sender.of("p", m.KVRead):
        receiver.place(request_id, read.blocks)
        num_bytes += sum(block.values.nbytes for block in read.blocks)
    receiver.executor.handle(m.TransferComplete(request_id, num_bytes, num_bytes))


def computed(driver: ExecutorDriver) -> tuple[int, int, int]:
    """Prompt and log positions computed, tokens sampled."""
    counters = driver.snapshot().counters
    return counters.computed_prompt_tokens, counters.computed_log_tokens, counters.sampled_tokens
