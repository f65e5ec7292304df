"""Case 112 at a worker: it pushes KV only to workers of its topology, where that says they are, and takes KV only from them."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from pddbridge.rpc.gen import worker_pb2
from tests.support.fake_engine import FakeEngine, expected_log
from tests.support.worker_harness import WorkerHarness

PROMPT = list(range(40, 70))


async def test_kv_is_pushed_only_where_the_topology_says_and_nobody_else_is_connected_to() -> None:
    connected = asyncio.Event()

    async def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    listener = await asyncio.start_server(meet, "127.0.0.1", 0)
    elsewhere = int(listener.sockets[0].getsockname()[1])
    async with WorkerHarness("main", FakeEngine, peers=("prefill",)) as main:
        receivers = {"main": (("127.0.0.1", main.kv_port),)}
        async with WorkerHarness("prefill", FakeEngine, receivers=receivers) as prefill:
            stream = main.attach().open("r", PROMPT, transfer=True, max_tokens=4)
            target = main.target((await stream.until("reserved")).reserved)
            wrong = [
                {"port": elsewhere},
                {"host": "localhost", "port": elsewhere},
                {"target": "stranger"},
                {"target": "stranger", "port": elsewhere},
            ]
            for number, changes in enumerate(wrong):
                changed = worker_pb2.PushTarget()
                changed.CopyFrom(target)
                changed.MergeFrom(worker_pb2.PushTarget(**changes))  # type: ignore[arg-type]
                refused = prefill.attach().open(f"w-{number}", PROMPT, decode=False, push_to=[changed])
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await refused.until("pushed")
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "the topology has" in str(caught.value.details())
            sender = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
            await sender.until("pushed")
            assert await stream.tokens(4) == expected_log(PROMPT, 4)
            await sender.half_close()
            await stream.half_close()
            assert not connected.is_set()
    listener.close()


async def test_a_worker_that_the_topology_does_not_name_is_refused() -> None:
    async with WorkerHarness("stranger", FakeEngine) as stranger, WorkerHarness("main", FakeEngine, peers=("prefill",)) as main:
        stream = main.attach().open("r", PROMPT, transfer=True, max_tokens=4)
        target = main.target((await stream.until("reserved")).reserved)
        sender = stranger.attach().open("r", PROMPT, decode=False, push_to=[target])
        failed = (await sender.until("failed")).failed
        assert (failed.code, failed.target) == ("INVALID_ARGUMENT", "main")
        assert "stranger" in failed.message
        await sender.half_close()
        await stream.half_close()
        ledger = await main.assert_idle()
        assert ledger.kv_bytes_received == 0
