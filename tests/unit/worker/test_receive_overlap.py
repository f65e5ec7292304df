"""The copy to the device overlaps the wire: frames come in while an earlier one is still being written."""

from __future__ import annotations

import asyncio
import threading

import numpy as np

from pddbridge.engine import KVBlock
from tests.support.fake_engine import FakeEngine, expected_log
from tests.support.worker_harness import WorkerHarness

PROMPT = list(range(40, 97))


async def test_frames_come_in_while_one_is_being_written() -> None:
    writing, may_write = threading.Event(), threading.Event()

    class SlowToWrite(FakeEngine):
        def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
            writing.set()
            assert may_write.wait(20)
            super().write_kv(page_table, block)

    async with WorkerHarness("prefill", FakeEngine) as prefill, WorkerHarness("main", SlowToWrite) as main:
        stream = main.attach().open("r", PROMPT, transfer=True, max_tokens=4)
        target = main.target((await stream.until("reserved")).reserved)
        source = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
        try:
            incoming = main.traffic.links.incoming
            async with asyncio.timeout(10):
                while not (writing.is_set() and len(incoming._writers) >= 4):
                    await asyncio.sleep(0.005)
            assert incoming.bytes_received == 0, "none is placed, so none is acknowledged"
        finally:
            may_write.set()
        await source.until("pushed")
        assert await stream.tokens(4) == expected_log(PROMPT, 4)
        await source.half_close()
        await stream.half_close()
