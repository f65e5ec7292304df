"""Channels and servers: sizes, ports, and a dead peer noticed within seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from pddbridge.rpc.channel import KeepAlive, address, bind, make_server, open_channel
from pddbridge.rpc.gen import inference_pb2 as pb
from pddbridge.rpc.gen import inference_pb2_grpc as pb_grpc

FAST = KeepAlive(time_s=0.2, timeout_s=0.3)


class Echo(pb_grpc.InferenceServicer):
    """Answers the text once, then keeps the stream open until the client goes."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        try:
            yield pb.GenerateResponse(text=request.text)
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


class BlackHole:
    """A TCP proxy that can stop forwarding without closing anything, as a pulled cable does. ``delay_s``: each way."""

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._target_port = target_port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        self._open.clear()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._open.wait()
                await asyncio.sleep(self._delay_s)
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def echo_server(keep_alive: KeepAlive = FAST) -> AsyncIterator[tuple[Echo, int]]:
    server, echo = make_server(keep_alive), Echo()
    pb_grpc.add_InferenceServicer_to_server(echo, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield echo, port
    finally:
        await server.stop(None)


async def test_a_silent_peer_ends_the_call_on_both_sides_within_seconds() -> None:
    async with echo_server() as (echo, port):
        hole = BlackHole(port)
        async with open_channel("127.0.0.1", await hole.start(), FAST) as channel:
            call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="hello"))
            first = await call.read()
            assert first.text == "hello"
            hole.cut()
            started = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), 5)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            await asyncio.wait_for(echo.cancelled.wait(), 5)
            assert time.monotonic() - started < 3
        await hole.close()


async def test_a_far_peer_is_reached_by_the_first_call() -> None:
    """Which fails with its attempt to connect: calls do not wait for the next."""
    async with echo_server(KeepAlive()) as (_, port):
        far = BlackHole(port, delay_s=0.3)
        async with open_channel("127.0.0.1", await far.start()) as channel:
            call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="hello"))
            assert (await call.read()).text == "hello"
            call.cancel()
        await far.close()


async def test_frequent_pings_on_a_quiet_call_are_no_offence() -> None:
    """By default a server answers pings like ours with GOAWAY too_many_pings; a quiet stream must live on.

    gRPC core leaves a second between pings, and the third strike is out: hence the seconds.
    """
    async with echo_server() as (_, port), open_channel("127.0.0.1", port, KeepAlive(0.05, 1.0)) as channel:
        call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="quiet"))
        await call.read()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.read())), 4.0)
        assert not call.done()
        call.cancel()


async def test_messages_far_over_the_default_size_pass() -> None:
    text = "x" * (9 * 1024 * 1024)
    async with echo_server() as (_, port), open_channel("127.0.0.1", port) as channel:
        call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text=text))
        answer = await call.read()
        assert answer.text == text
        call.cancel()


async def test_a_smaller_limit_is_kept() -> None:
    async with echo_server() as (_, port), open_channel("127.0.0.1", port, max_message_bytes=1000) as channel:
        call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="x" * 2000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_port_in_use_is_one_clear_line() -> None:
    async with echo_server() as (_, port):
        second = make_server()
        with pytest.raises(ValueError, match=rf"^port: cannot listen on 127\.0\.0\.1:{port}: address already in use$"):
            bind(second, "127.0.0.1", port)


def test_addresses() -> None:
    assert address("10.0.0.1", 80) == "10.0.0.1:80"
    assert address("::1", 80) == "[::1]:80"
