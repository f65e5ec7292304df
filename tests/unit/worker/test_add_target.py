"""A receiver that joins a prefill under way gets everything, what was computed before it came too; one that cannot be ends the request."""

from __future__ import annotations

import pytest

from pddbridge.rpc.gen import worker_pb2 as pb
from tests.support.fake_engine import KV_SPEC, FakeEngine
from tests.support.worker_harness import WorkerHarness

PROMPT = list(range(1, 24))


@pytest.mark.parametrize("first", ["one", "none"])
async def test_one_that_joins_late_gets_all_that_it_lacks(first: str) -> None:
    """Also where nobody was pushed to before."""
    workers = (WorkerHarness(name, FakeEngine) for name in ("p", "relay", "main"))
    async with next(workers) as prefill, next(workers) as relay, next(workers) as main:
        streams = [worker.attach().open("r", PROMPT, transfer=True, decode=False) for worker in (relay, main)]
        to_relay, to_main = [
            worker.target((await stream.until("reserved")).reserved) for worker, stream in zip((relay, main), streams, strict=True)
        ]
        sender = prefill.attach().open("r", PROMPT, decode=False, push_to=[to_relay] if first == "one" else [])
        await sender.until("prefilled")
        if first == "none":
            sender.send(pb.WorkerCommand(add_target=to_relay))
        sender.send(pb.WorkerCommand(add_target=to_main))
        assert {(await sender.until("pushed")).pushed.target for _ in range(2)} == {"relay", "main"}
        for stream in streams:
            assert (await stream.until("kv_complete")).kv_complete.received_bytes == (len(PROMPT) - 1) * KV_SPEC.bytes_per_token
        for stream in (*streams, sender):
            await stream.half_close()


async def test_one_that_lacks_nothing_is_done_at_once() -> None:
    async with WorkerHarness("p", FakeEngine) as prefill:
        sender = prefill.attach().open("r", PROMPT, decode=False)
        sender.send(pb.WorkerCommand(add_target=pb.PushTarget(target="main", first_token=len(PROMPT) - 1)))
        pushed = (await sender.until("pushed")).pushed
        assert (pushed.target, pushed.bytes) == ("main", 0)
        await sender.half_close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (pb.PushTarget(target="main", first_token=0), "add_target.transfer_id: given 0"),
        (pb.PushTarget(target="main", first_token=99, transfer_id=1), "add_target.first_token: given 99"),
    ],
)
async def test_one_that_cannot_be_ends_the_request(wrong: pb.PushTarget, message: str) -> None:
    async with WorkerHarness("p", FakeEngine) as prefill:
        sender = prefill.attach().open("r", PROMPT, decode=False)
        sender.send(pb.WorkerCommand(add_target=wrong))
        failed = (await sender.until_failed()).failed
        assert failed.code == "INVALID_ARGUMENT"
        assert message in failed.message
        await sender.half_close()


async def test_nobody_is_pushed_to_twice() -> None:
    async with WorkerHarness("p", FakeEngine) as prefill, WorkerHarness("main", FakeEngine) as main:
        on_main = main.attach().open("r", PROMPT, transfer=True, decode=False)
        target = main.target((await on_main.until("reserved")).reserved)
        sender = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
        sender.send(pb.WorkerCommand(add_target=target))
        assert "'main' is pushed to already" in (await sender.until_failed()).failed.message
        for stream in (sender, on_main):
            await stream.half_close()
