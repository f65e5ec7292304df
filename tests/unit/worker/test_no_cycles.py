"""What a worker's request leaves behind is freed when it ends: see tests/unit/serving/test_no_cycles.py."""

from __future__ import annotations

import pytest

from tests.support.cycles import cycles_of
from tests.support.fake_engine import FakeEngine
from tests.support.worker_harness import WorkerHarness

PROMPT_TOKENS = 57  # 56 positions in steps of 16


@pytest.mark.parametrize("state", ["prefilled", "pushed", "decoded"])
@pytest.mark.parametrize("how", ["cancel", "half_close"])
async def test_a_request_that_ends_is_gone(state: str, how: str) -> None:
    async with WorkerHarness("p", FakeEngine) as prefill, WorkerHarness("w", FakeEngine) as receiver:
        await ask(prefill, receiver, 0, state, how)
        with cycles_of("pdd.worker", "pddbridge.") as found:
            for i in (1, 2, 3):
                await ask(prefill, receiver, i, state, how)
    assert not found


async def ask(prefill: WorkerHarness, receiver: WorkerHarness, number: int, state: str, how: str) -> None:
    """A request of its own prompt, whose KV is pushed, until ``state``; then both ends of it are ended."""
    name, prompt = f"r{number}", list(range(40 + number, 40 + number + PROMPT_TOKENS))
    stream = receiver.attach().open(name, prompt, transfer=True)
    target = receiver.target((await stream.until("reserved")).reserved)
    sender = prefill.attach().open(name, prompt, decode=False, push_to=[target])
    await sender.until("prefilled" if state == "prefilled" else "pushed")
    if state == "decoded":
        await stream.tokens(8)
    for attached in (sender, stream):
        if how == "cancel":
            attached.cancel()
        else:
            await attached.half_close()
    await prefill.assert_idle()
    await receiver.assert_idle()
