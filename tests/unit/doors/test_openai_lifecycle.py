"""Ends that are not plain: clients that leave, failures on the way, ids that collide; and what identifies and seeds a request."""

from __future__ import annotations

import asyncio
import json

import grpc
import grpc.aio
import openai
import pytest

from pdd.errors import Code, PddError
from pdd.serving.sampling_check import choice_seed
from pdd.serving.text.model import TextModel
from pddbridge.rpc.gen import inference_pb2, inference_pb2_grpc
from tests.support.doors import SERVING, Doors, open_doors, until
from tests.support.scripted_coordinator import Limits, Script, ScriptedCoordinator, failure

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def ask(path: str, **fields: object) -> dict[str, object]:
    return {"model": "tiny", **({"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}), **fields}


async def send_raw(port: int, path: str, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
    return reader, writer


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_at", [0, 3])
async def test_a_client_that_leaves_while_nothing_is_said(text: TextModel, path: str, stream: bool, pause_at: int) -> None:
    """No token comes by which the door could notice: it must see the connection close."""
    async with open_doors(ScriptedCoordinator(text, Script(pause_at=pause_at))) as doors:
        reader, writer = await send_raw(doors.http_port, path, ask(path, stream=stream, max_tokens=9, n=2))
        await until(lambda: doors.coordinator.num_tokens_made == 2 * pause_at and len(doors.coordinator.running) == 2)
        if stream and pause_at:
            await reader.readuntil(b"data: ")
        writer.close()
        async with asyncio.timeout(1):
            await doors.idle()
        assert doors.coordinator.num_tokens_made == 2 * pause_at
        doors.coordinator.resume.set()
        assert (await doors.post(path, ask(path))).status_code == 200


@PATHS
async def test_a_client_that_leaves_a_running_stream(text: TextModel, path: str) -> None:
    tokens = tuple([104] * 100_000)
    async with open_doors(ScriptedCoordinator(text, Script(tokens=tokens))) as doors:
        doors.coordinator.limits = Limits(max_context_tokens=200_000)
        async with doors.http.stream("POST", path, json=ask(path, stream=True, max_tokens=100_000)) as answer:
            async for _ in answer.aiter_lines():
                break
        async with asyncio.timeout(2):
            await doors.idle()
        assert doors.coordinator.num_tokens_made < 100_000


async def test_the_official_client_closes_a_stream(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text, Script(pause_at=2))) as doors:
        stream = await doors.openai.completions.create(model="tiny", prompt="x", stream=True)
        await anext(aiter(stream))
        await stream.close()
        async with asyncio.timeout(1):
            await doors.idle()


async def test_a_client_that_never_reads_holds_no_generation(text: TextModel) -> None:
    """The answer waits in memory and in socket buffers; the workers are free again."""
    async with open_doors(ScriptedCoordinator(text, Script(tokens=tuple([104] * 20_000)))) as doors:
        doors.coordinator.limits = Limits(max_context_tokens=50_000)
        _reader, writer = await send_raw(doors.http_port, COMPLETIONS, ask(COMPLETIONS, stream=True, max_tokens=20_000))
        await until(lambda: doors.coordinator.num_tokens_made == 20_000 and not doors.coordinator.running, within_s=20)
        writer.close()


@pytest.mark.slow
async def test_a_client_that_takes_nothing_is_cut_off_and_counted_at_either_door(text: TextModel) -> None:
    """More than all buffers on the way hold, so that the doors cannot get rid of it: gRPC's window grows to 16 MiB and more."""
    script = Script(tokens=tuple([104] * 60_000))
    async with open_doors(ScriptedCoordinator(text, script), stalled_after_s=0.3) as doors:
        doors.coordinator.limits = Limits(max_context_tokens=100_000)
        _reader, writer = await send_raw(doors.http_port, COMPLETIONS, ask(COMPLETIONS, stream=True, max_tokens=60_000))
        call = inference_pb2_grpc.InferenceStub(doors.channel).Generate(
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6]), max_tokens=60_000, num_logprobs=20, ignore_eos=True)
        )
        await until(lambda: sorted(doors.stalled) == ["grpc", "http"], within_s=60)
        with pytest.raises(grpc.aio.AioRpcError, match="took nothing"):
            async for _ in call:
                pass
        await doors.idle()
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
        (Code.UNAVAILABLE, 503, "server_error"),
        (Code.DEADLINE_EXCEEDED, 504, "server_error"),
        (Code.INVALID_ARGUMENT, 400, "invalid_request_error"),
    ],
)
async def test_a_failure_before_the_first_token_has_its_status(text: TextModel, code: Code, status: int, kind: str, stream: bool) -> None:
    async with open_doors(ScriptedCoordinator(text, failure(PddError(code, "said so"), 0))) as doors:
        for path in (CHAT, COMPLETIONS):
            answer = await doors.post(path, ask(path, stream=stream))
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == "said so"
            assert answer.json()["error"]["type"] == kind
            assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_a_refused_client_is_told_when_to_come_again(text: TextModel) -> None:
    full = PddError(Code.RESOURCE_EXHAUSTED, "300 requests wait already, allowed are 256", retry_after_s=7.2)
    async with open_doors(ScriptedCoordinator(text, failure(full, 0))) as doors:
        answer = await doors.post(CHAT, ask(CHAT, stream=True))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_failure_tells_nothing_of_the_inside(text: TextModel, stream: bool) -> None:
    script = failure(PddError(Code.INTERNAL, ""), 0)
    script.error = KeyError("secret")
    async with open_doors(ScriptedCoordinator(text, script)) as doors:
        answer = await doors.post(COMPLETIONS, ask(COMPLETIONS, stream=stream))
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


@PATHS
async def test_a_failure_on_the_way_is_an_error_event_and_no_done(text: TextModel, path: str) -> None:
    async with open_doors(ScriptedCoordinator(text, failure(PddError(Code.UNAVAILABLE, "main-0 is gone"), 3))) as doors:
        events = await doors.events(path, ask(path, stream_options={"include_usage": True}))
        assert "[DONE]" not in events
        assert json.loads(events[-1]) == {
            "error": {"message": "main-0 is gone", "type": "server_error", "param": None, "code": "unavailable"}
        }
        chunks = [json.loads(data) for data in events[:-1]]
        assert chunks
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert all(chunk["usage"] is None for chunk in chunks)
        whole = await doors.post(path, ask(path))
        assert whole.status_code == 503
        stream = await doors.openai.chat.completions.create(**ask(CHAT), stream=True)
        with pytest.raises(openai.APIError, match="main-0 is gone"):
            [chunk async for chunk in stream]


@pytest.mark.parametrize("script", [Script(silent_end=True), Script(fail_at=2, error=KeyError("secret"))])
async def test_our_own_faults_on_the_way_end_streams_with_an_error_too(text: TextModel, script: Script) -> None:
    async with open_doors(ScriptedCoordinator(text, script)) as doors:
        events = await doors.events(COMPLETIONS, ask(COMPLETIONS))
        assert "[DONE]" not in events
        assert json.loads(events[-1])["error"]["type"] == "server_error"
        assert "secret" not in events[-1]
        assert (await doors.post(COMPLETIONS, ask(COMPLETIONS))).status_code == 500


async def test_one_failing_choice_ends_the_others(text: TextModel) -> None:
    class OneFails(ScriptedCoordinator):
        async def generate(self, request):  # type: ignore[no-untyped-def]
            self.script = failure(PddError(Code.UNAVAILABLE, "gone"), 1) if request.request_id.endswith("-1") else Script(pause_at=1)
            async for delta in super().generate(request):
                yield delta

    async with open_doors(OneFails(text)) as doors:
        async with asyncio.timeout(2):
            answer = await doors.post(COMPLETIONS, ask(COMPLETIONS, n=3))
        assert answer.status_code == 503
        assert not doors.coordinator.running


async def test_a_shutdown_tells_those_who_still_wait(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text, Script(pause_at=2)), grace_s=1) as doors:
        whole = asyncio.create_task(doors.post(COMPLETIONS, ask(COMPLETIONS)))
        streamed = asyncio.create_task(doors.events(COMPLETIONS, ask(COMPLETIONS)))
        await until(lambda: doors.coordinator.num_tokens_made == 4)
        doors.http_server.should_exit = True
        async with asyncio.timeout(4):
            answer, events = await asyncio.gather(whole, streamed)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == json.loads(events[-1])["error"]["message"] == "the service is shutting down"
        await doors.idle()


@PATHS
async def test_stopped_streams_end_with_stop_and_done(text: TextModel, path: str) -> None:
    async with open_doors(ScriptedCoordinator(text, Script(tokens=(104, 2), finish_reason="stop"))) as doors:
        events = await doors.events(path, ask(path))
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"


async def test_equal_request_ids_of_clients_do_not_collide(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text, Script(pause_at=1))) as doors:
        first = asyncio.create_task(doors.post(COMPLETIONS, ask(COMPLETIONS, prompt="abc", seed=1), **{"x-request-id": "same"}))
        await until(lambda: len(doors.coordinator.running) == 1)
        _reader, writer = await send_raw(doors.http_port, COMPLETIONS, ask(COMPLETIONS, prompt="xyz", seed=1, stream=True))
        await until(lambda: len(doors.coordinator.running) == 2)
        writer.close()
        await until(lambda: len(doors.coordinator.running) == 1)
        second = asyncio.create_task(doors.post(COMPLETIONS, ask(COMPLETIONS, prompt="xyz", seed=1), **{"x-request-id": "same"}))
        await until(lambda: len(doors.coordinator.running) == 2)
        doors.coordinator.resume.set()
        answers = [await first, await second]
        assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
        assert len({answer.json()["id"] for answer in answers}) == 2
        assert answers[0].json()["choices"][0]["text"] != answers[1].json()["choices"][0]["text"]
        assert len({request.request_id for request in doors.coordinator.requests}) == 3
        assert not any("same" in request.request_id for request in doors.coordinator.requests)


async def test_request_id_comes_back_with_errors_and_streams(doors: Doors) -> None:
    for body in (b"{", json.dumps(ask(COMPLETIONS)).encode(), json.dumps(ask(COMPLETIONS, stream=True)).encode()):
        assert (await doors.post(COMPLETIONS, body, **{"x-request-id": "mine"})).headers["x-request-id"] == "mine"
    assert "x-request-id" not in (await doors.post(COMPLETIONS, ask(COMPLETIONS))).headers
    long = await doors.post(COMPLETIONS, ask(COMPLETIONS), **{"x-request-id": "y" * 1000})
    assert long.headers["x-request-id"] == "y" * 256


async def test_seeds_of_choices_follow_from_the_request(doors: Doors) -> None:
    await doors.post(COMPLETIONS, ask(COMPLETIONS, seed=42, n=3))
    assert [request.sampling.seed for request in doors.coordinator.requests] == [42, choice_seed(42, 1), choice_seed(42, 2)]
    doors.coordinator.requests.clear()
    await doors.post(COMPLETIONS, ask(COMPLETIONS, seed=-5))
    assert doors.coordinator.requests[0].sampling.seed == 2**64 - 5


@pytest.mark.parametrize("fields", [{}, {"seed": None}, {"seed": -1}])
async def test_requests_without_seed_get_one_of_their_own(doors: Doors, fields: dict[str, object]) -> None:
    await doors.post(COMPLETIONS, ask(COMPLETIONS, prompt=["a", "a"], **fields))
    await doors.post(COMPLETIONS, ask(COMPLETIONS, **fields))
    seeds = [request.sampling.seed for request in doors.coordinator.requests]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_every_sampling_field_arrives(doors: Doors) -> None:
    await doors.post(
        COMPLETIONS,
        ask(
            COMPLETIONS,
            temperature=0.75,
            top_k=7,
            top_p=0.5,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            logit_bias={"5": 1, "299": -100},
            seed=9,
            max_tokens=20,
            min_tokens=3,
            stop=["x", "yz"],
            stop_token_ids=[7, 8],
            ignore_eos=True,
            logprobs=4,
            cache_salt="pepper",
        ),
    )
    (request,) = doors.coordinator.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.75, 7, 0.5, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.25, -0.5)
    assert sampling.logit_bias == ((5, 1.0), (299, -100.0))
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (9, 20, 3)
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == {7, 8}
    assert sampling.eos_token_ids == doors.coordinator.text.eos_token_ids == {0, 2}
    assert sampling.num_logprobs == 4
    assert request.stop_strings == ("x", "yz")
    assert request.want_text
    assert request.timeout_s == SERVING.request_timeout_s


async def test_defaults_and_off_values(doors: Doors) -> None:
    await doors.post(COMPLETIONS, ask(COMPLETIONS))
    for top_k in (0, -1, 300, 2**70):
        await doors.post(COMPLETIONS, ask(COMPLETIONS, top_k=top_k, stop="x", temperature=1e-6))
    plain, *off = doors.coordinator.requests
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.sampling.max_tokens) == (1.0, 1.0, SERVING.default_max_tokens)
    assert (plain.sampling.num_logprobs, plain.stop_strings, plain.sampling.ignore_eos) == (None, (), False)
    assert all(request.sampling.top_k is None and request.stop_strings == ("x",) for request in off)
    assert all(request.sampling.temperature == 0.0 for request in off)


async def test_a_salt_divides_the_prefix_cache_but_is_not_its_name(doors: Doors) -> None:
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "default"}):
        await doors.post(COMPLETIONS, ask(COMPLETIONS, **salt))
    tenants = [request.tenant for request in doors.coordinator.requests]
    assert len(set(tenants)) == 4
    assert all(tenant.split("/")[0] == "default" for tenant in tenants)
