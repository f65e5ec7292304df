"""pdd.v1.Inference through a client that knows nothing but what reflection tells it, and through the shipped stubs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdd.errors import Code, PddError
from pdd.serving.text.model import TextModel
from pddbridge.rpc.gen import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.doors import SERVING, Doors, open_doors, until
from tests.support.scripted_coordinator import TIMELINE, Limits, Script, ScriptedCoordinator, expected_tokens, failure

pytestmark = pytest.mark.asyncio(loop_scope="module")

Ask = inference_pb2.GenerateRequest
NAN, INF = float("nan"), float("inf")


def stub_of(doors: Doors) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(doors.channel)


def ids(*token_ids: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=token_ids)


async def answers(doors: Doors, request: Ask) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in stub_of(doors).Generate(request)]


async def refused(doors: Doors, request: Ask) -> grpc.aio.AioRpcError:
    """Checks too that nothing was started and that the next request is served."""
    before = len(doors.coordinator.requests)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(doors, request)
    assert len(doors.coordinator.requests) == before
    assert await answers(doors, Ask(text="x", max_tokens=1))
    return caught.value


@pytest.mark.parametrize("method", ["Generate", "ListModels"])
async def test_bytes_that_are_no_message_are_the_clients_mistake(doors: Doors, method: str, caplog: pytest.LogCaptureFixture) -> None:
    path, garbage = f"/pdd.v1.Inference/{method}", b"\xff\xff\xff"
    answer = doors.channel.unary_stream(path)(garbage).read() if method == "Generate" else doors.channel.unary_unary(path)(garbage)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (line,) = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert method in line.getMessage()
    assert line.exc_info is None
    assert await answers(doors, Ask(text="x", max_tokens=1))


async def test_text_in_text_out(doors: Doors) -> None:
    said = await answers(doors, Ask(model="tiny", text="the end", max_tokens=5, seed=3))
    (request,) = doors.coordinator.requests
    text = doors.coordinator.text
    assert list(request.prompt_ids) == text.encode("the end", True)
    assert "".join(response.text for response in said) == "".join(map(text.token_text, expected_tokens(request)))
    assert [token.token_id for response in said for token in response.tokens] == list(expected_tokens(request))
    assert [response.origin for response in said] == [common_pb2.ORIGIN_RELAY] * 2 + [common_pb2.ORIGIN_MAIN] * 3
    assert [response.finish_reason for response in said] == [common_pb2.FINISH_REASON_UNSPECIFIED] * 4 + [common_pb2.FINISH_REASON_LENGTH]
    assert not any(response.HasField("usage") or response.HasField("timeline") for response in said[:-1])
    usage, timeline = said[-1].usage, said[-1].timeline
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(request.prompt_ids), 5, 5)
    assert (timeline.pipeline, timeline.wan_kv_bytes, timeline.ttft_s) == (TIMELINE.pipeline, TIMELINE.wan_kv_bytes, TIMELINE.ttft_s)


async def test_tokens_in_tokens_out(doors: Doors) -> None:
    await answers(doors, Ask(token_ids=ids(5, 299), tokens_only=True, cache_salt="s", timeout_s=2.5))
    (request,) = doors.coordinator.requests
    assert request.prompt_ids == (5, 299)
    assert not request.want_text
    assert request.tenant.endswith("/s")
    assert request.timeout_s == 2.5


async def test_chat(doors: Doors) -> None:
    messages = [("system", "be brief"), ("user", "hello")]
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in messages])
    await answers(doors, Ask(chat=chat))
    rendered = doors.coordinator.text.render_chat([{"role": role, "content": content} for role, content in messages])
    assert list(doors.coordinator.requests[0].prompt_ids) == rendered


async def test_every_sampling_field_arrives(doors: Doors) -> None:
    override = inference_pb2.PipelineOverride(pipeline="relay", handoff="overlap", handoff_at=0)
    await answers(
        doors,
        Ask(
            text="x",
            max_tokens=20,
            min_tokens=3,
            temperature=0.7,
            top_k=7,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.3,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            logit_bias=[common_pb2.LogitBias(token_id=5, bias=1.1)],
            seed=2**64 - 1,
            stop=["end"],
            stop_token_ids=[7],
            ignore_eos=True,
            num_logprobs=2,
            override=override,
        ),
    )
    (request,) = doors.coordinator.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k, sampling.seed) == (20, 3, 7, 2**64 - 1)
    assert [sampling.temperature, sampling.top_p, sampling.min_p] == pytest.approx([0.7, 0.9, 0.1])
    assert [sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty] == pytest.approx([1.3, 0.2, -0.3])
    assert sampling.logit_bias == ((5, pytest.approx(1.1)),)
    assert (request.stop_strings, sampling.stop_token_ids, sampling.ignore_eos) == (("end",), {7}, True)
    assert (request.override.pipeline, request.override.handoff, request.override.handoff_at) == ("relay", "overlap", 0)
    assert sampling.eos_token_ids == doors.coordinator.text.eos_token_ids


async def test_absent_and_zero_differ(doors: Doors) -> None:
    await answers(doors, Ask(text="x"))
    await answers(doors, Ask(text="x", temperature=0, seed=0, num_logprobs=0))
    absent, zero = doors.coordinator.requests
    assert (absent.sampling.temperature, absent.sampling.num_logprobs) == (1.0, None)
    assert (zero.sampling.temperature, zero.sampling.num_logprobs, zero.sampling.seed) == (0.0, 0, 0)


async def test_logprobs(doors: Doors) -> None:
    said = await answers(doors, Ask(text="x", max_tokens=2, num_logprobs=3))
    assert [token.logprob for response in said for token in response.tokens] == [-0.5, -1.5]
    assert all(len(token.top_logprobs) == 3 for response in said for token in response.tokens)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Ask(), "input"),
        (Ask(text=""), "text"),
        (Ask(token_ids=ids()), "token_ids"),
        (Ask(token_ids=ids(-1)), "token_ids"),
        (Ask(token_ids=ids(5, 300)), "token_ids"),
        (Ask(token_ids=ids(2**31 - 1)), "token_ids"),
        (Ask(chat=inference_pb2.Chat()), "chat.messages"),
        (Ask(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="wizard")])), "chat.messages[0].role"),
        (Ask(token_ids=ids(*[5] * 512)), "token_ids"),
        (Ask(text="x", max_tokens=0), "max_tokens"),
        (Ask(text="x", max_tokens=2**32 - 1), "text"),
        (Ask(text="x", max_tokens=3, min_tokens=4), "min_tokens"),
        (Ask(text="x", temperature=NAN), "temperature"),
        (Ask(text="x", temperature=INF), "temperature"),
        (Ask(text="x", top_p=NAN), "top_p"),
        (Ask(text="x", top_p=0), "top_p"),
        (Ask(text="x", min_p=-INF), "min_p"),
        (Ask(text="x", repetition_penalty=0), "repetition_penalty"),
        (Ask(text="x", presence_penalty=NAN), "presence_penalty"),
        (Ask(text="x", frequency_penalty=3), "frequency_penalty"),
        (Ask(text="x", logit_bias=[common_pb2.LogitBias(token_id=5, bias=NAN)]), "logit_bias"),
        (Ask(text="x", logit_bias=[common_pb2.LogitBias(token_id=300, bias=1)]), "logit_bias"),
        (Ask(text="x", logit_bias=[common_pb2.LogitBias(token_id=5)] * 2), "logit_bias"),
        (Ask(text="x", stop_token_ids=[-1]), "stop_token_ids"),
        (Ask(text="x", stop=[""]), "stop"),
        (Ask(text="x", stop=["y"], tokens_only=True), "stop"),
        (Ask(text="x", num_logprobs=21), "logprobs"),
        (Ask(text="x", timeout_s=NAN), "timeout_s"),
        (Ask(text="x", timeout_s=0), "timeout_s"),
        (Ask(text="x", override=inference_pb2.PipelineOverride(pipeline="remote")), "override.pipeline"),
        (Ask(text="x", override=inference_pb2.PipelineOverride(handoff="sideways")), "override.handoff"),
        (Ask(text="x", override=inference_pb2.PipelineOverride(handoff_at=2**31)), "handoff_at"),
    ],
    ids=lambda value: str(value).replace("\n", " ")[:60],
)
async def test_bad_input_names_its_field(doors: Doors, request_: Ask, field: str) -> None:
    error = await refused(doors, request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["pdd-field"] == field


async def test_unknown_model_and_too_large_message(doors: Doors) -> None:
    assert (await refused(doors, Ask(model="other", text="x"))).code() is grpc.StatusCode.NOT_FOUND
    assert (await refused(doors, Ask(text="x" * SERVING.max_body_bytes))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_overrides_need_leave(text: TextModel) -> None:
    strict = SERVING.model_copy(update={"allow_override": False})
    async with open_doors(ScriptedCoordinator(text), strict) as doors:
        error = await refused(doors, Ask(text="x", override=inference_pb2.PipelineOverride(handoff_at=3)))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert await answers(doors, Ask(text="x", override=inference_pb2.PipelineOverride()))


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED, Code.INTERNAL])
async def test_failures_have_a_real_status(text: TextModel, code: Code, position: int) -> None:
    said: list[inference_pb2.GenerateResponse] = []

    async def read(doors: Doors) -> None:
        async for response in stub_of(doors).Generate(Ask(text="x")):
            said.append(response)  # noqa: PERF401 - what came before the failure counts

    async with open_doors(ScriptedCoordinator(text, failure(PddError(code, "it broke"), position))) as doors:
        with pytest.raises(grpc.aio.AioRpcError, match="it broke") as caught:
            await read(doors)
    assert caught.value.code().name == code.name
    assert len(said) == position
    assert all(response.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED for response in said)


@pytest.mark.parametrize("script", [Script(silent_end=True), Script(fail_at=1, error=KeyError("secret"))])
async def test_our_own_faults_are_internal(text: TextModel, script: Script) -> None:
    async with open_doors(ScriptedCoordinator(text, script)) as doors:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(doors, Ask(text="x"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()


@pytest.mark.parametrize("pause_at", [0, 3])
async def test_cancelling_closes_the_generation(text: TextModel, pause_at: int) -> None:
    async with open_doors(ScriptedCoordinator(text, Script(pause_at=pause_at))) as doors:
        call = stub_of(doors).Generate(Ask(text="x"))
        reading = asyncio.create_task(call.read())
        await until(lambda: doors.coordinator.num_tokens_made == pause_at and bool(doors.coordinator.running))
        call.cancel()
        async with asyncio.timeout(1):
            await doors.idle()
        await asyncio.gather(reading, return_exceptions=True)


async def test_cancelling_a_running_stream_closes_it(text: TextModel) -> None:
    limits = Limits(max_context_tokens=200_000)
    async with open_doors(ScriptedCoordinator(text, Script(tokens=tuple([104] * 100_000)), limits)) as doors:
        call = stub_of(doors).Generate(Ask(text="x", max_tokens=100_000))
        await call.read()
        call.cancel()
        async with asyncio.timeout(2):
            await doors.idle()
        assert doors.coordinator.num_tokens_made < 100_000


async def test_a_call_deadline_ends_the_generation_and_bounds_its_time(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text, Script(pause_at=1))) as doors:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub_of(doors).Generate(Ask(text="x"), timeout=0.3):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(1):
            await doors.idle()
        assert doors.coordinator.requests[0].timeout_s <= 0.3


async def test_list_models(doors: Doors) -> None:
    (model,) = (await stub_of(doors).ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.name, model.max_context_tokens, model.vocab_size) == ("tiny", 512, 300)


async def test_health_follows_the_workers(doors: Doors) -> None:
    stub = health_pb2_grpc.HealthStub(doors.channel)

    async def status(service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    assert await status("") == await status("pdd.v1.Inference") == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="pdd.v1.Inference"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    doors.unhealthy.append("main-0")
    assert (await asyncio.wait_for(watch.read(), 2)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await status("") == health_pb2.HealthCheckResponse.NOT_SERVING
    doors.unhealthy.clear()
    assert (await asyncio.wait_for(watch.read(), 2)).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_a_client_made_from_reflection_alone(doors: Doors) -> None:
    message = await _reflected(doors.channel, "pdd.v1.Inference")
    request_class, response_class = message("pdd.v1.GenerateRequest"), message("pdd.v1.GenerateResponse")
    call = doors.channel.unary_stream(
        "/pdd.v1.Inference/Generate", request_serializer=request_class.SerializeToString, response_deserializer=response_class.FromString
    )
    said = [response async for response in call(request_class(text="x", max_tokens=4, seed=1))]
    assert [token.token_id for response in said for token in response.tokens] == list(expected_tokens(doors.coordinator.requests[0]))


async def _reflected(channel: grpc.aio.Channel, symbol: str) -> Callable[[str], type]:
    """Message classes by name, from the files that the server's reflection gives for ``symbol``."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    listed = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    services = {service.name for response in [r async for r in listed] for service in response.list_services_response.service}
    assert {"pdd.v1.Inference", "grpc.health.v1.Health"} <= services
    asked = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)]))
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    async for response in asked:
        for data in response.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            files[file.name] = file
    pool = descriptor_pool.DescriptorPool()

    def add(name: str) -> None:
        for needed in files[name].dependency:
            add(needed)
        pool.Add(files[name])

    add("pdd/v1/inference.proto")
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
