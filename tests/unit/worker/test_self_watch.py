"""A hang is seen from outside the thread that hangs: what Info says of the step thread, and the worker that ends itself."""

from __future__ import annotations

import asyncio
import threading

from pdd.worker.self_watch import SelfWatch, Stillness
from pddbridge.engine import Step, StepResult
from pddbridge.rpc.gen import worker_pb2
from tests.support.fake_engine import FakeEngine, expected_log
from tests.support.worker_harness import WorkerHarness

PROMPT = list(range(40, 70))


class Stuck(FakeEngine):
    """Its steps wait for a gate that its second step closes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.taken = 0

    def step(self, step: Step) -> StepResult:
        self.taken += 1
        if self.taken == 2:
            self.gate.clear()
        assert self.gate.wait(20.0)
        return super().step(step)


async def step_age_s(worker: WorkerHarness) -> float:
    age_s: float = (await worker.stub.Info(worker_pb2.InfoRequest(), timeout=5.0)).step_age_s
    return age_s


async def until_asleep(worker: WorkerHarness) -> None:
    """It may just be at the end of a turn in which it was asked something."""
    async with asyncio.timeout(5.0):
        while await step_age_s(worker) > 0.0:
            await asyncio.sleep(0.01)


async def test_info_is_answered_while_the_step_thread_hangs_and_says_for_how_long() -> None:
    engine = Stuck()
    async with WorkerHarness("main", lambda: engine, check_idle_within_s=5.0) as worker:
        await until_asleep(worker)
        stream = worker.attach().open("r", PROMPT, max_tokens=6)
        async with asyncio.timeout(10.0):
            while engine.gate.is_set():
                await asyncio.sleep(0.01)
        ages = []
        for _ in range(8):
            ages.append(await step_age_s(worker))
            await asyncio.sleep(0.05)
        assert ages == sorted(ages)
        assert ages[-1] > 0.3
        engine.gate.set()
        assert await stream.tokens(6) == expected_log(PROMPT, 6)
        await stream.half_close()
        await worker.assert_idle()
        await until_asleep(worker)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    still = Stillness()
    assert [still.look(mark) for mark in (1.0, 1.0, 1.0, 2.0, 2.0, None, None, None, 2.0, 2.0)] == [0, 1, 2, 0, 1, 0, 0, 0, 0, 1]


async def test_a_step_thread_or_an_event_loop_that_stands_still_ends_the_process() -> None:
    for hanging in ("step thread", "event loop"):
        ended: list[str] = []
        done = threading.Event()
        turn: list[float | None] = [None]

        def end(message: str, ended: list[str] = ended, done: threading.Event = done) -> None:
            ended.append(message)
            done.set()

        watch = SelfWatch(lambda turn=turn: turn[0], after_s=0.8, end=end)  # type: ignore[misc]
        watch.start()
        await asyncio.sleep(1.2)
        assert ended == [], "a worker at rest, or at work, lives on"
        if hanging == "step thread":
            turn[0] = 17.0
            async with asyncio.timeout(5.0):
                while not done.is_set():
                    await asyncio.sleep(0.05)
        else:
            assert done.wait(5.0), "this thread is the loop's: it stands still meanwhile"
        watch.stop()
        assert len(ended) == 1
        assert hanging in ended[0]
