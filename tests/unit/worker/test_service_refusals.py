"""The worker service over real gRPC and the real KV link, with the in-test engine: what it refuses, and by which name."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pdd.worker.executor import ExecutorLimits
from pddbridge.rpc.gen import worker_pb2
from tests.support.fake_engine import FakeEngine, expected_log
from tests.support.worker_harness import Gate, WorkerHarness, status_of

PROMPT = list(range(40, 63))


async def test_models_that_differ_refuse_each_other() -> None:
    async with (
        WorkerHarness("p", lambda: FakeEngine(weights="one")) as prefill,
        WorkerHarness("main", lambda: FakeEngine(weights="another")) as main,
    ):
        on_main = main.attach().open("r", PROMPT, transfer=True)
        target = main.target((await on_main.until("reserved")).reserved)
        on_prefill = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
        while (event := await on_prefill.next()).WhichOneof("event") != "failed":
            pass
        assert event.failed.target == "main"
        assert "fingerprint" in event.failed.message
        on_main.cancel()
        await on_prefill.half_close()
        assert (await main.assert_idle()).kv_bytes_received == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids: empty"),
        ({"prompt_ids": [-1]}, "prompt_ids[0]"),
        ({"prompt_ids": [5, 300]}, "prompt_ids[1]"),
        ({"prompt_ids": [2**31 - 1]}, "prompt_ids[0]"),
        ({"log_ids": [1, 300]}, "log_ids[1]"),
        ({"prompt_ids": [1] * 101}, "this worker's context is 100"),
        ({"prompt_ids": [1] * 60, "log_ids": [1] * 41}, "this worker's context is 100"),
        ({"request_id": ""}, "request_id"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"kv_source": 0}, "kv_source"),
        ({"push_to": [worker_pb2.PushTarget(target="a", first_token=3)]}, "push_to[0].first_token"),
        ({"prompt_ids": [1] * 9, "push_to": [worker_pb2.PushTarget(target="a", first_token=3)]}, "push_to[0].transfer_id"),
        ({"prompt_ids": [1] * 9, "push_to": [worker_pb2.PushTarget(target="a", transfer_id=1)]}, "push_to[0]: given host"),
    ],
)
async def test_bad_opens_are_refused_by_name(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"request_id": "r", "prompt_ids": [5, 6], "kv_source": 1, "timeout_s": 5.0}
    async with WorkerHarness("w", FakeEngine) as worker:
        stream = worker.attach()
        stream.send(worker_pb2.WorkerCommand(open=worker_pb2.Open(**{**fields, **change})))  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.next()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in (caught.value.details() or "")
        after = worker.attach().open("next", PROMPT)
        assert await after.tokens(8) == expected_log(PROMPT, 8)
        await after.half_close()


async def test_ids_out_of_range_in_the_handoff_fail_the_request() -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        for bad in (-1, 300, 2**31 - 1):
            stream = worker.attach().open("r", PROMPT, decode=False)
            await stream.until("prefilled")
            stream.ingest(0, [5, bad], decode=True)
            failed = (await stream.next()).failed
            assert failed.code == "INVALID_ARGUMENT"
            assert str(bad) in failed.message
            with pytest.raises(EOFError):
                await stream.next()
            await worker.assert_idle()


async def test_a_first_command_other_than_open_and_a_second_open_are_refused() -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        stream = worker.attach()
        stream.seal()
        assert await status_of(stream) is grpc.StatusCode.INVALID_ARGUMENT
        stream = worker.attach().open("r", PROMPT, decode=False)
        await stream.until("prefilled")
        stream.open("r2", PROMPT)
        assert (await stream.next()).failed.code == "INVALID_ARGUMENT"


async def test_a_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    gate = Gate()
    async with WorkerHarness("w", lambda: FakeEngine(before_step=gate)) as worker:
        stream = worker.attach().open("r", PROMPT)
        await gate.until_reached()
        assert await status_of(worker.attach().open("r", [1, 2, 3])) is grpc.StatusCode.INVALID_ARGUMENT
        gate.open()
        assert await stream.tokens(8) == expected_log(PROMPT, 8)
        await stream.half_close()


async def test_a_full_queue_is_resource_exhausted() -> None:
    async with WorkerHarness("w", lambda: FakeEngine(num_pages=4), limits=ExecutorLimits(max_waiting=1)) as worker:
        first = worker.attach().open("r0", PROMPT, decode=False)
        await first.until("prefilled")
        second = worker.attach().open("r1", PROMPT[::-1], decode=False)
        while (await worker.ledger()).num_requests < 2:
            await asyncio.sleep(0.01)
        assert await status_of(worker.attach().open("r2", [1, *PROMPT], decode=False)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.half_close()
        await second.until("prefilled")
        await second.half_close()
