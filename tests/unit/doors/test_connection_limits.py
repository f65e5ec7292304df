"""Connections that say nothing, too slowly, too much, or are too many; and what errors do not tell."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from pdd.errors import Code, PddError
from pdd.serving.http_limits import MAX_HEADER_BYTES, HttpLimits
from pdd.serving.public_errors import public_message
from pdd.serving.text.model import TextModel
from pddbridge.rpc.channel import ServerLimits, bind, make_server
from pddbridge.rpc.gen import inference_pb2, inference_pb2_grpc
from tests.support.doors import SERVING, open_doors, until
from tests.support.scripted_coordinator import Script, ScriptedCoordinator

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(5):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("said", [b"", b"GET /hea", GET, GET + b"\r\n" + GET], ids=["nothing", "half a line", "no end", "a second without"])
async def test_headers_that_do_not_come_are_not_waited_for(text: TextModel, said: bytes) -> None:
    limits = HttpLimits(header_timeout_s=0.2)
    async with open_doors(ScriptedCoordinator(text), limits=limits) as doors:
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.http_port)
        writer.write(said)
        answer = await until_closed(reader)
        assert (b"200 OK" in answer) == (said.count(GET) == 2)
        assert limits.counts.slow == 1
        writer.close()
        assert (await doors.http.get("/health")).status_code == 200


async def test_an_answer_may_take_longer_than_headers_may(text: TextModel) -> None:
    limits = HttpLimits(header_timeout_s=0.1)
    async with open_doors(ScriptedCoordinator(text, Script(pause_at=1)), limits=limits) as doors:
        ask = doors.post("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 3})
        asking = asyncio.create_task(ask)
        await until(lambda: len(doors.coordinator.running) == 1)
        done, _ = await asyncio.wait({asking}, timeout=0.3)
        assert not done
        doors.coordinator.resume.set()
        assert (await asking).status_code == 200
        assert limits.counts.slow == 0


async def test_more_connections_than_allowed_are_closed_and_others_go_on(text: TextModel) -> None:
    limits = HttpLimits(max_connections=3)
    async with open_doors(ScriptedCoordinator(text), limits=limits) as doors:
        held = [await asyncio.open_connection("127.0.0.1", doors.http_port) for _ in range(3)]
        await until(lambda: len(doors.http_server.server_state.connections) == 3)
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.http_port)
        assert await until_closed(reader) == b""
        writer.close()
        assert limits.counts.refused == 1
        held[0][1].write(GET + b"connection: close\r\n\r\n")
        assert b"200 OK" in await until_closed(held[0][0])
        for _, writer in held:
            writer.close()
        await until(lambda: not doors.http_server.server_state.connections)
        assert (await doors.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"x-filler: " + b"a" * (MAX_HEADER_BYTES - 1000) + b"\r\n", 200),
        (b"x-filler: " + b"a" * 70_000 + b"\r\n", 431),
        (b"x-filler: " + b"a" * 200_000 + b"\r\n", 431),
        (b"".join(b"x-%d: " % i + b"a" * 4096 + b"\r\n" for i in range(40)), 431),
        (b"x-filler: " + b"a" * 4_000_000 + b"\r\n", 431),
        (b"content-length: abc\r\n", 400),
        (b"no header\r\n", 400),
    ],
    ids=["allowed", "just too large", "too large", "too many", "far too large", "bad length", "bad header"],
)
async def test_headers_that_are_too_large_or_none_are_told_so(text: TextModel, said: bytes, status: int) -> None:
    """Whatever the client goes on to send, the answer reaches it."""
    async with open_doors(ScriptedCoordinator(text)) as doors:
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.http_port)
        writer.write(GET + b"connection: close\r\n" + said + b"\r\n")
        head, _, body = (await until_closed(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        if status != 200:
            error = json.loads(body)["error"]
            assert error["type"] == "invalid_request_error"
            assert ("larger than 65536 bytes" in error["message"]) == (status == 431)
        await writer.drain()  # all of it was taken
        writer.close()
        await until(lambda: not doors.http_server.server_state.connections)
        assert (await doors.http.get("/health")).status_code == 200


async def test_deep_json_is_refused(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text)) as doors:
        deep = b'{"model": "tiny", "prompt": "hi", "user": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
        answer = await doors.post("/v1/completions", deep)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_more_messages_than_any_chat_has_are_refused(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text), SERVING.model_copy(update={"max_body_bytes": 1024 * 1024})) as doors:
        answer = await doors.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}] * 4097})
        assert answer.status_code == 400
        assert "at most 4096" in answer.json()["error"]["message"]


async def test_a_grpc_server_takes_so_many_connections_and_no_more() -> None:
    server = make_server(limits=ServerLimits(max_connections=2))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in held:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        for reader, _ in held:
            async with asyncio.timeout(5):
                assert await reader.readexactly(9)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await until_closed(reader) == b""
        for _, held_writer in held:
            held_writer.close()
        writer.close()
    finally:
        await server.stop(0)


async def test_grpc_metadata_beyond_its_limit_is_refused(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text)) as doors:
        stub = inference_pb2_grpc.InferenceStub(doors.channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("x-filler", "a" * 40_000),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.ListModels(inference_pb2.ListModelsRequest())).models


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("main-0: 10.1.2.3:7001: failed 8 times in a row", "main-0: [address]: failed 8 times in a row"),
        ("worker main-0 ended: ipv4:127.0.0.1:33: refused", "worker main-0 ended: [address] refused"),
        ("cannot reach [::1]:99 or fe80::1:2:3 or node-7.dc1:8443", "cannot reach [address] or [address] or [address]"),
        ("no file /srv/pdd/models/tiny/config.json here", "no file [path] here"),
        ("not finished after 30.5 s, 3/4 done at 12:30", "not finished after 30.5 s, 3/4 done at 12:30"),
    ],
)
async def test_errors_of_ours_tell_no_address_and_no_path(message: str, told: str) -> None:
    assert public_message(PddError(Code.UNAVAILABLE, message)) == told
    assert public_message(PddError(Code.INVALID_ARGUMENT, message)) == message


async def test_both_doors_tell_the_public_message(text: TextModel) -> None:
    error = PddError(Code.UNAVAILABLE, "main-0 at 10.1.2.3:7001 is gone")
    async with open_doors(ScriptedCoordinator(text, Script(fail_at=1, error=error))) as doors:
        ask = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
        told = [
            (await doors.post("/v1/completions", ask)).text,
            *(await doors.events("/v1/completions", ask)),
        ]
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in inference_pb2_grpc.InferenceStub(doors.channel).Generate(inference_pb2.GenerateRequest(text="hi", max_tokens=3)):
                pass
        told.append(str(failed.value.details()))
        assert sum("main-0 at [address] is gone" in line for line in told) == 3
        assert not any("10.1.2.3" in line for line in told)
