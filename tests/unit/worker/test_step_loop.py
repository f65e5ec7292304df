"""The step thread: commands in, events out, no spinning, and nobody left waiting when it ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from pdd.errors import Code
from pdd.worker import messages as m
from pdd.worker.step_loop import THREAD_NAME, Events, StepLoop, StepLoopEndedError
from pddbridge.engine import KVBlock
from pddbridge.give_way import COMPUTE_NICE
from pddbridge.kv_spec import HeadRange, LayerRange, TokenRange
from pddbridge.sampling_params import SamplingParams
from tests.support.fake_engine import FakeEngine, expected_log

PROMPT = tuple(range(40, 63))


class Inbox:
    """Collects events; ``until`` waits for one that fits."""

    def __init__(self) -> None:
        self.events: Events = []
        self.crashes: list[BaseException] = []
        self._more = asyncio.Event()

    def deliver(self, events: Events) -> None:
        self.events += events
        self._more.set()

    def crashed(self, error: BaseException) -> None:
        self.crashes.append(error)
        self._more.set()

    async def until(self, kind: type[m.Event]) -> m.Event:
        async with asyncio.timeout(10):
            while True:
                self._more.clear()
                for _, event in self.events:
                    if isinstance(event, kind):
                        return event
                await self._more.wait()

    def log(self) -> list[int]:
        return [record.token_id for _, event in self.events if isinstance(event, m.Tokens) for record in event.records]


def start(inbox: Inbox, engine: FakeEngine | None = None) -> StepLoop:
    loop = StepLoop(lambda: engine or FakeEngine(), asyncio.get_running_loop(), inbox.deliver, inbox.crashed)
    loop.start()
    return loop


async def stop(loop: StepLoop) -> None:
    loop.stop()
    assert await asyncio.to_thread(loop.join, 10.0)


def opening(deadline_s: float = 60.0, transfer: bool = False) -> m.OpenRequest:
    params = SamplingParams(seed=1, max_tokens=8)
    return m.OpenRequest("r", "t", PROMPT, (), params, transfer, True, None, (), time.monotonic() + deadline_s)


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_the_step_thread_and_the_threads_of_its_engine_give_way_to_the_event_loop() -> None:
    before, found = niceness(), {}
    nicer = min(before + COMPUTE_NICE, 19)

    class Pool(FakeEngine):
        """Starts a thread, as frameworks do, when it is made."""

        def __init__(self, before_step: Callable[[object], None]) -> None:
            super().__init__(before_step=before_step)
            helper = threading.Thread(target=lambda: found.update(helper=niceness()))
            helper.start()
            helper.join()

    def hold(step: object) -> None:
        found.update(step=niceness())

    inbox = Inbox()
    loop = StepLoop(lambda: Pool(before_step=hold), asyncio.get_running_loop(), inbox.deliver, inbox.crashed)
    loop.start()
    loop.submit(opening())
    await inbox.until(m.Tokens)
    await stop(loop)
    assert found == {"step": nicer, "helper": nicer}
    assert niceness() == before


async def test_what_a_command_led_to_is_told_before_the_step() -> None:
    inbox, leave = Inbox(), Future[None]()

    def hold(step: object) -> None:
        leave.result(10)

    loop = start(inbox, FakeEngine(before_step=hold))
    loop.submit(opening())
    try:
        await inbox.until(m.Reserved)
        assert not inbox.log()
    finally:
        leave.set_result(None)
    await inbox.until(m.Tokens)
    await stop(loop)


async def test_a_flood_of_received_kv_does_not_hold_up_decode_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.worker.step_loop.PLACE_BYTES_PER_STEP", block().values.nbytes)
    inbox = Inbox()
    running, entered, leave = asyncio.get_running_loop(), asyncio.Event(), Future[None]()

    def hold(step: object) -> None:
        running.call_soon_threadsafe(entered.set)
        leave.result(10)

    engine = FakeEngine(before_step=hold)
    loop = start(inbox, engine)
    loop.submit(replace(opening(transfer=True), request_id="receiving"))
    loop.submit(opening())
    await asyncio.wait_for(entered.wait(), 10)
    placing: list[Future[None]] = [Future() for _ in range(10)]
    for done in placing:
        loop.submit(m.PlaceKV("receiving", block(), done))
    leave.set_result(None)
    for done in placing:
        await asyncio.wait_for(asyncio.wrap_future(done), 10)
    while len(inbox.log()) < 8:
        await asyncio.sleep(0.005)
    runs = [len(list(group)) for name, group in itertools.groupby(engine.calls) if name == "write_kv"]
    assert sum(runs) == 10
    assert max(runs) == 2  # one fills the allowance, the next one exceeds it
    await stop(loop)


def block() -> KVBlock:
    return KVBlock("k", LayerRange(0, 2), TokenRange(0, 1), HeadRange(0, 3), np.zeros((2, 1, 3, 4), np.float32))


async def test_a_request_runs_to_its_end_and_gives_its_pages_back() -> None:
    inbox = Inbox()
    loop = start(inbox)
    facts = await asyncio.wrap_future(loop.ready)
    assert (facts.engine, facts.spec.vocab_size) == ("fake", 300)
    loop.submit(opening())
    while len(inbox.log()) < 8:
        await asyncio.sleep(0.005)
    assert inbox.log() == expected_log(PROMPT, 8)
    await loop.close("r")
    await loop.close("r")
    snapshot = await loop.snapshot()
    assert (snapshot.pages.pinned, snapshot.num_requests) == (0, 0)
    await stop(loop)


async def test_whatever_happened_to_a_request_is_told_before_it_is_closed() -> None:
    """Else a request that reuses the id could be told."""
    inbox = Inbox()
    running, entered, leave = asyncio.get_running_loop(), asyncio.Event(), Future[None]()

    def hold(step: object) -> None:
        running.call_soon_threadsafe(entered.set)
        leave.result(10)

    loop = start(inbox, FakeEngine(before_step=hold))
    loop.submit(opening())
    await asyncio.wait_for(entered.wait(), 10)
    loop.submit(m.FailRequest("r", Code.INTERNAL, "told first"))
    closing = asyncio.create_task(loop.close("r"))
    await asyncio.sleep(0)
    leave.set_result(None)
    await closing
    assert inbox.events[-1] == ("r", m.Failed(Code.INTERNAL, "told first"))
    await stop(loop)


async def test_an_idle_loop_burns_no_processor_time() -> None:
    inbox = Inbox()
    loop = start(inbox)
    loop.submit(opening(transfer=True))
    await inbox.until(m.Reserved)
    ident = next(thread.ident for thread in threading.enumerate() if thread.name == THREAD_NAME)
    assert ident is not None
    clock = time.pthread_getcpuclockid(ident)
    before_s = time.clock_gettime(clock)
    await asyncio.sleep(0.3)
    assert time.clock_gettime(clock) - before_s < 0.005
    await stop(loop)


async def test_a_deadline_wakes_the_sleeping_thread() -> None:
    inbox = Inbox()
    loop = start(inbox)
    started_s = time.monotonic()
    loop.submit(opening(deadline_s=0.2, transfer=True))
    failed = await inbox.until(m.Failed)
    assert isinstance(failed, m.Failed)
    assert failed.code is Code.DEADLINE_EXCEEDED
    assert 0.2 <= time.monotonic() - started_s < 1.2
    await stop(loop)


async def test_an_engine_that_does_not_start_is_told_to_who_waits() -> None:
    def broken() -> FakeEngine:
        raise ValueError("no such model")

    inbox = Inbox()
    loop = StepLoop(broken, asyncio.get_running_loop(), inbox.deliver, inbox.crashed)
    loop.start()
    with pytest.raises(ValueError, match="no such model"):
        await asyncio.wrap_future(loop.ready)
    with pytest.raises(StepLoopEndedError):
        await loop.snapshot()
    await loop.close("r")
    assert not inbox.crashes


async def test_a_crash_is_told_and_nobody_waits_for_ever() -> None:
    class Broken(FakeEngine):
        def stats(self) -> object:  # type: ignore[override]
            if self.steps:
                raise SystemError("memory corrupted")
            return super().stats()

    inbox = Inbox()
    loop = start(inbox, Broken())
    await asyncio.wrap_future(loop.ready)
    loop.submit(opening())
    await inbox.until(m.Tokens)
    crashing = asyncio.create_task(loop.snapshot())
    closing = asyncio.create_task(loop.close("r"))
    with pytest.raises(SystemError, match="memory corrupted"):
        await asyncio.wait_for(crashing, 10)
    await asyncio.wait_for(closing, 10)
    async with asyncio.timeout(10):
        while not inbox.crashes:
            await asyncio.sleep(0.005)
    assert [str(error) for error in inbox.crashes] == ["memory corrupted"]
    with pytest.raises(StepLoopEndedError):
        loop.submit(opening())


async def test_stopping_answers_what_is_still_in_the_inbox() -> None:
    inbox = Inbox()
    entered, leave = asyncio.Event(), Future[None]()
    running = asyncio.get_running_loop()

    def hold(step: object) -> None:
        running.call_soon_threadsafe(entered.set)
        leave.result(10)

    loop = start(inbox, FakeEngine(before_step=hold))
    loop.submit(opening())
    await asyncio.wait_for(entered.wait(), 10)
    placing: Future[None] = Future()
    loop.submit(m.PlaceKV("r", block(), placing))
    closing = asyncio.create_task(loop.close("r"))
    await asyncio.sleep(0)
    loop.stop()
    leave.set_result(None)
    await asyncio.wait_for(closing, 10)
    with pytest.raises(StepLoopEndedError):
        placing.result(10)


async def test_a_block_whose_placing_was_given_up_is_not_written() -> None:
    inbox = Inbox()
    engine = FakeEngine()
    loop = start(inbox, engine)
    loop.submit(opening(transfer=True))
    await inbox.until(m.Reserved)
    given_up: Future[None] = Future()
    given_up.cancel()
    loop.submit(m.PlaceKV("r", block(), given_up))
    await loop.snapshot()
    assert np.isnan(engine.pages("k")).all()
    await stop(loop)
