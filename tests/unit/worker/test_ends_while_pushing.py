"""Case 25 where KV comes from: a request is ended in each state of its pushes, twice, also in the moment in which they complete."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from pdd.worker.transfers import KVTraffic
from pddbridge.engine import KVBlock, Step
from tests.support.fake_engine import FakeEngine, expected_log
from tests.support.worker_harness import WorkerHarness

PROMPT = list(range(40, 97))  # 56 positions in steps of 16


class Held:
    """The receiver's placing waits for ``gate``; ``num_came`` blocks have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
        self.num_came = 0
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()
        place = KVTraffic._place

        async def held(traffic: KVTraffic, transfer_id: int, block: KVBlock) -> None:
            self.num_came += 1
            await self.gate.wait()
            await place(traffic, transfer_id, block)

        monkeypatch.setattr(KVTraffic, "_place", held)

    async def aclose(self) -> None:
        """Also where a test fails: else nothing could end."""
        self.gate.set()


@pytest.mark.parametrize("state", ["prefilling", "last chunk", "prefilled", "sent", "acknowledging", "pushed"])
@pytest.mark.parametrize("how", ["cancel", "half_close"])
async def test_ending_the_sender_in_every_state_of_its_push_returns_all_pages(
    state: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_chunk = {"prefilling": 1, "last chunk": 3}.get(state)
    reached, may_go_on = threading.Event(), threading.Event()

    def stop(step: Step) -> None:
        if at_chunk is not None and step.context_lens[0] == 16 * at_chunk and not may_go_on.is_set():
            reached.set()
            assert may_go_on.wait(10)

    held = Held(monkeypatch, is_open=state not in ("sent", "acknowledging"))
    async with (
        WorkerHarness("p", lambda: FakeEngine(before_step=stop)) as prefill,
        WorkerHarness("w", FakeEngine) as receiver,
        contextlib.aclosing(held),
    ):
        stream = receiver.attach().open("r", PROMPT, transfer=True)
        target = receiver.target((await stream.until("reserved")).reserved)
        sender = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
        match state:
            case "prefilling" | "last chunk":
                assert await asyncio.to_thread(reached.wait, 10)
            case "prefilled":
                await sender.until("prefilled")
            case "sent" | "acknowledging":
                await sender.until("prefilled")
                async with asyncio.timeout(5):
                    while not held.num_came:
                        await asyncio.sleep(0.005)
            case "pushed":
                await sender.until("pushed")
        if state == "acknowledging":
            held.gate.set()  # acknowledgements and the end cross
        if how == "cancel":
            sender.cancel()
            sender.cancel()
        else:
            closing = asyncio.create_task(sender.half_close())
        may_go_on.set()
        if how == "half_close":
            await closing
        await prefill.assert_idle()
        held.gate.set()
        if state == "pushed":
            assert await stream.tokens(8) == expected_log(PROMPT, 8)
        await stream.half_close()
        await receiver.assert_idle()
        # Both serve the same request again, under the same id.
        stream = receiver.attach().open("r", [7, *PROMPT], transfer=True)
        target = receiver.target((await stream.until("reserved")).reserved)
        sender = prefill.attach().open("r", [7, *PROMPT], decode=False, push_to=[target])
        await sender.until("pushed")
        assert await stream.tokens(8) == expected_log([7, *PROMPT], 8)
        for end in (sender, stream):
            await end.half_close()
