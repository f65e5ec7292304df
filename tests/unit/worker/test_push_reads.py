"""Copies to the host overlap what is computed next: their order, what they hold, and what becomes of them when a request ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdd.errors import Code
from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pddbridge.engine import KVBlock, PendingKV, Step, StepResult, start_read_kv
from pddbridge.kv_spec import TokenRange
from tests.support.executor_driver import ExecutorDriver
from tests.support.fake_engine import FakeEngine, kv_of

PROMPT = list(range(40, 97))  # 56 positions to push in steps of 16


@dataclass
class Copy:
    """Copied from the pages themselves, as late as possible: when it is collected, or when the engine is about to write."""

    number: int
    log: list[str]
    take: Callable[[], tuple[KVBlock, ...]]
    values: tuple[KVBlock, ...] | None = None
    ready: bool = False
    error: Exception | None = None

    def finish(self, why: str) -> tuple[KVBlock, ...]:
        if self.values is None:
            self.values = self.take()
            self.log.append(f"{why} {self.number}")
        return self.values

    def blocks(self) -> tuple[KVBlock, ...]:
        if self.error is not None:
            raise self.error
        return self.finish("collect")


@dataclass
class Device:
    """What an :class:`OverlappingEngine` did, in order, and its open copies."""

    log: list[str] = field(default_factory=list)
    copies: list[tuple[np.ndarray, Copy]] = field(default_factory=list)
    error: Exception | None = None


class OverlappingEngine(FakeEngine):
    """A device: a copy is under way until it is collected, and orders what is written to its pages behind it."""

    device: Device

    def step(self, step: Step) -> StepResult:
        written = {
            int(step.page_tables[row][at // self.config.page_size])
            for row, start in enumerate(step.context_lens.tolist())
            for at in range(start, start + int(step.row_starts[row + 1] - step.row_starts[row]))
        }
        self._before_writing(written)
        self.device.log.append(f"step {len(self.steps) + 1}")
        return super().step(step)

    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        self._before_writing(set(page_table.tolist()))
        super().write_kv(page_table, block)

    def start_read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> PendingKV:
        number = len(self.device.copies) + 1
        table = page_table.copy()
        copy = Copy(number, self.device.log, lambda: self.read_kv(table, tokens, out), error=self.device.error)
        self.device.log.append(f"start {number}")
        self.device.copies.append((table[tokens.start // self.config.page_size : -(-tokens.stop // self.config.page_size)], copy))
        return copy

    def _before_writing(self, pages: set[int]) -> None:
        for table, copy in self.device.copies:
            if copy.values is None and pages & set(table.tolist()):
                copy.finish("write waits for")


def driver(**options: int) -> tuple[ExecutorDriver, Device]:
    engine = OverlappingEngine(**options)  # type: ignore[arg-type]
    engine.device = Device()
    return ExecutorDriver(engine, use_prefix_cache=False), engine.device


def assert_pushed(driven: ExecutorDriver, request_id: str, prompt: list[int]) -> None:
    reads = driven.of(request_id, m.KVRead)
    assert [at for read in reads for at in range(read.tokens.start, read.tokens.stop)] == list(range(len(prompt) - 1))
    for read in reads:
        for block in read.blocks:
            for offset, at in enumerate(range(read.tokens.start, read.tokens.stop)):
                assert np.array_equal(block.values[:, offset], kv_of(block.plane, at, prompt[at]))


def test_the_next_step_is_dispatched_before_a_copy_is_collected() -> None:
    driven, device = driver()
    driven.open("p", PROMPT, decode=False, push_to=[m.PushTo("main", 0)])
    driven.run()
    # Pages of 8, steps of 16: no copy shares a page with the step after it, so nothing waits for one.
    assert device.log == [
        *("step 1", "start 1"),
        *("step 2", "collect 1", "start 2"),
        *("step 3", "collect 2", "start 3"),
        *("step 4", "collect 3", "start 4"),
        "collect 4",  # no step follows
    ]
    assert_pushed(driven, "p", PROMPT)
    # Chunks leave while later ones are computed: the first before prefill was over.
    assert driven.kinds("p").index("KVRead") < driven.kinds("p").index("Prefilled")
    driven.close("p")
    driven.assert_idle()


def test_a_copy_that_is_there_at_once_leaves_at_once() -> None:
    engine = FakeEngine()
    driven = ExecutorDriver(engine, use_prefix_cache=False)
    driven.open("p", PROMPT, decode=False, push_to=[m.PushTo("main", 0)])
    for number in range(1, 5):
        driven.step()
        assert len(driven.of("p", m.KVRead)) == number
    assert start_read_kv(engine, np.zeros(1, np.int32), TokenRange(0, 1)).ready


def test_a_preempted_request_s_pages_are_not_rewritten_before_they_are_copied() -> None:
    """Its pages go to another while its last chunk is on the way; what arrives is what was there."""
    driven, device = driver(num_pages=8, max_rows=2)
    driven.open("p", PROMPT[:33], decode=False, push_to=[m.PushTo("main", 0)], limit=None)
    driven.step()
    driven.step()
    assert device.log == ["step 1", "start 1", "step 2", "collect 1", "start 2"]
    request = driven.executor._requests["p"]
    driven.executor._memory.release(request)  # as a preemption does
    request.kv_len = 32
    other = list(range(150, 200))
    driven.open("q", other, decode=False)
    driven.run()
    assert "write waits for 2" in device.log
    assert device.log.index("write waits for 2") < device.log.index("step 3")
    assert_pushed(driven, "p", PROMPT[:33])


@pytest.mark.parametrize("how", ["close", "fail"])
def test_what_is_under_way_for_a_request_that_is_over_is_dropped(how: str) -> None:
    driven, device = driver()
    driven.open("p", PROMPT, decode=False, push_to=[m.PushTo("main", 0)])
    driven.step()
    if how == "close":
        driven.close("p")
        driven.open("p", PROMPT[:9], decode=False)  # the id again: it must not hear of the other's KV
    else:
        driven.executor.handle(m.FailRequest("p", Code.INTERNAL, "enough"))
    driven.run()
    assert driven.of("p", m.KVRead) == []
    assert "collect 1" not in device.log
    driven.close("p")
    driven.assert_idle()


def test_a_copy_that_fails_fails_its_request_alone() -> None:
    driven, device = driver()
    driven.open("other", PROMPT[:20], max_tokens=3)
    device.error = RuntimeError("the device is gone")
    driven.open("p", PROMPT, decode=False, push_to=[m.PushTo("main", 0)])
    driven.run()
    (failed,) = driven.of("p", m.Failed)
    assert (failed.code, "the device is gone" in failed.message) == (Code.INTERNAL, True)
    assert driven.of("p", m.KVRead) == []
    assert len(driven.log("other")) == 3
    for request_id in ("p", "other"):
        driven.close(request_id)
    driven.assert_idle()


def test_the_window_bounds_what_is_under_way() -> None:
    engine = OverlappingEngine()
    engine.device = Device()
    per_token = engine.kv_spec.bytes_per_token
    driven = ExecutorDriver(
        engine, use_prefix_cache=False, limits=ExecutorLimits(push_window_bytes=20 * per_token, push_piece_bytes=8 * per_token)
    )
    driven.open("p", PROMPT, decode=False, push_to=[m.PushTo("main", 0)])
    driven.run()
    assert sum(len(read.tokens) for read in driven.of("p", m.KVRead)) == 24
    driven.executor.handle(m.PushAcknowledged("p", "main", 24 * per_token))
    driven.run()
    assert sum(len(read.tokens) for read in driven.of("p", m.KVRead)) == 48


def test_a_read_is_made_where_a_link_lends_memory_and_anywhere_where_it_does_not() -> None:
    engine = FakeEngine()
    lent: list[np.ndarray] = []
    asked: list[bool] = []

    def lend(num_bytes: int, shared: bool) -> np.ndarray | None:
        asked.append(shared)
        if len(asked) > 2:
            return None
        lent.append(np.full(num_bytes, 9, np.uint8))
        return lent[-1]

    driven = ExecutorDriver(engine, use_prefix_cache=False)
    driven.open("p", PROMPT, decode=False, push_to=[m.PushTo("main", 16), m.PushTo("relay", 0, lend)])
    driven.run()
    reads = driven.of("p", m.KVRead)
    assert [read.targets for read in reads] == [("relay",), *[("main", "relay")] * 3]
    assert asked == [False, True, True, True]  # a slot of a read that both get is held by the slower one
    for number, read in enumerate(reads):
        inside = [np.shares_memory(block.values, lent[min(number, 1)]) for block in read.blocks]
        assert inside == [number < 2] * len(read.blocks)
    assert_pushed(driven, "p", PROMPT)
