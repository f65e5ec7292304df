"""The gRPC front door: pdd.v1.Inference, with reflection and standard health. Checks are those of every door (``admission_check``)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import asdict
from typing import NoReturn, Protocol, get_args

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdd.errors import Code, PddError
from pdd.serving.accounts import Accounts
from pdd.serving.admission_check import NO_OVERRIDE, ChatPrompt, IdsPrompt, Prompt, TextPrompt, Wish, admit, new_call_id
from pdd.serving.choice_log import ChoiceLog, usage
from pdd.serving.front import Front
from pdd.serving.grpc_keys import RequireKey, tenant_of
from pdd.serving.grpc_malformed import RefuseMalformed
from pdd.serving.public_errors import public_message, retry_after_s
from pdd.serving.request import Delta, GenerationRequest, HandoffName, Origin, Override, PipelineName
from pdd.serving.sampling_check import SamplingWish, refuse
from pdd.serving.streams import interleave
from pddbridge.rpc.channel import ServerLimits, make_server
from pddbridge.rpc.convert import finish_reason_to_proto, record_to_proto
from pddbridge.rpc.gen import common_pb2, inference_pb2, inference_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_LIMITS = ServerLimits()
_ORIGINS: dict[Origin, common_pb2.Origin] = {"relay": common_pb2.ORIGIN_RELAY, "main": common_pb2.ORIGIN_MAIN}
Context = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Errors leave with the status that is named like their pdd.errors.Code; the field to blame is in the trailing metadata "pdd-field"."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802 - gRPC's spelling
        """Writes responses instead of yielding them: a cancelled call then raises here, and the generation is closed at once."""
        try:
            await self._generate(request, context)
        except PddError as error:
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            log.error("a request failed unexpectedly", exc_info=error)
            await _abort(context, PddError(Code.INTERNAL, "internal error"))

    async def ListModels(  # noqa: N802
        self, _request: inference_pb2.ListModelsRequest, _context: grpc.aio.ServicerContext[Message, Message]
    ) -> inference_pb2.ListModelsResponse:
        limits = self._front.generator.limits
        model = inference_pb2.Model(name=limits.model_name, max_context_tokens=limits.max_context_tokens, vocab_size=limits.vocab_size)
        return inference_pb2.ListModelsResponse(models=[model])

    async def _generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        tenant = tenant_of(self._front.accounts, context.invocation_metadata())
        requests = await admit(read_wish(request, context.time_remaining()), self._front, tenant)
        said = ChoiceLog(self._front.text, requests[0])
        async with aclosing(interleave([self._front.generator.generate(requests[0])])) as deltas:
            async for _, delta in deltas:
                said.accept(delta)
                await self._write(context, _response(delta, requests, said))
        said.end()

    async def _write(self, context: Context, response: inference_pb2.GenerateResponse) -> None:
        """Raises PddError for a client that takes nothing for too long; what is not written yet is bounded by the request's tokens."""
        try:
            async with asyncio.timeout(self._front.stalled_after_s):
                await context.write(response)
        except TimeoutError:
            self._front.stalled("grpc")
            message = f"the client took nothing of the answer for {self._front.stalled_after_s:g} s"
            raise PddError(Code.DEADLINE_EXCEEDED, message) from None


class HealthStatus(Protocol):
    """grpc_health's asyncio servicer, of which the published type stubs do not know."""

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None: ...
    async def enter_graceful_shutdown(self) -> None: ...


async def start_grpc(front: Front, server: grpc.aio.Server) -> HealthStatus:
    """Adds the services to a bound ``server`` and starts it. ``follow_health`` keeps the health service true."""
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(front), server)
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    await _set_health(front, servicer)
    await server.start()
    return servicer


async def follow_health(front: Front, status: HealthStatus, period_s: float = 0.5) -> NoReturn:
    """Keeps the health service true until cancelled."""
    while True:
        await asyncio.sleep(period_s)
        await _set_health(front, status)


def make_door_server(
    max_message_bytes: int, accounts: Accounts | None = None, public_health: bool = True, limits: ServerLimits = _LIMITS
) -> grpc.aio.Server:
    """For clients of any kind; a message above ``max_message_bytes`` is refused with RESOURCE_EXHAUSTED before it is read. ``accounts``:
    calls need a key, but those of the health service where it is public.
    """
    public = (health.SERVICE_NAME,) if public_health else ()
    interceptors: list[grpc.aio.ServerInterceptor] = [] if accounts is None else [RequireKey(accounts, public)]
    interceptors.append(RefuseMalformed(SERVICE))
    return make_server(max_message_bytes=max_message_bytes, interceptors=interceptors, limits=limits)


def read_wish(request: inference_pb2.GenerateRequest, time_remaining_s: float | None) -> Wish:
    """``time_remaining_s``: what the call's own deadline leaves. Raises PddError(INVALID_ARGUMENT) naming the field."""
    field, prompt = _prompt(request)
    timeouts_s = [s for s in (time_remaining_s, request.timeout_s if request.HasField("timeout_s") else None) if s is not None]
    return Wish(
        call_id=new_call_id("gen"),
        field=field,
        model=request.model or None,
        prompts=(prompt,),
        sampling=_sampling(request),
        seed=request.seed if request.HasField("seed") else None,
        stop_strings=tuple(request.stop),
        want_text=not request.tokens_only,
        cache_salt=request.cache_salt or None,
        timeout_s=min(timeouts_s) if timeouts_s else None,
        override=_override(request),
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
    )


async def _set_health(front: Front, status: HealthStatus) -> None:
    """SERVING while every worker can be used; for the whole server ("") and for the service."""
    reply = health_pb2.HealthCheckResponse
    for service in ("", SERVICE):
        await status.set(service, reply.NOT_SERVING if front.unhealthy() else reply.SERVING)


def _prompt(request: inference_pb2.GenerateRequest) -> tuple[str, Prompt]:
    kind = request.WhichOneof("input")
    if kind == "text":
        return kind, TextPrompt(request.text)
    if kind == "token_ids":
        return kind, IdsPrompt(tuple(request.token_ids.ids))
    if kind == "chat":
        return "chat.messages", ChatPrompt(tuple((message.role, message.content) for message in request.chat.messages))
    raise refuse("input", None, "one of text, token_ids, chat")


def _sampling(request: inference_pb2.GenerateRequest) -> SamplingWish:
    def given(name: str) -> bool:
        return request.HasField(name)

    return SamplingWish(
        max_tokens=request.max_tokens if given("max_tokens") else None,
        min_tokens=request.min_tokens if given("min_tokens") else None,
        temperature=request.temperature if given("temperature") else None,
        top_k=request.top_k if given("top_k") else None,
        top_p=request.top_p if given("top_p") else None,
        min_p=request.min_p if given("min_p") else None,
        repetition_penalty=request.repetition_penalty if given("repetition_penalty") else None,
        presence_penalty=request.presence_penalty if given("presence_penalty") else None,
        frequency_penalty=request.frequency_penalty if given("frequency_penalty") else None,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in request.logit_bias),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        num_logprobs=request.num_logprobs if given("num_logprobs") else None,
    )


def _override(request: inference_pb2.GenerateRequest) -> Override:
    if not request.HasField("override"):
        return NO_OVERRIDE
    wanted = request.override
    pipelines: dict[str, PipelineName] = {name: name for name in get_args(PipelineName)}
    handoffs: dict[str, HandoffName] = {name: name for name in get_args(HandoffName)}
    if wanted.pipeline and wanted.pipeline not in pipelines:
        raise refuse("override.pipeline", wanted.pipeline, f"one of {list(pipelines)}")
    if wanted.handoff and wanted.handoff not in handoffs:
        raise refuse("override.handoff", wanted.handoff, f"one of {list(handoffs)}")
    return Override(
        pipeline=pipelines.get(wanted.pipeline),
        handoff=handoffs.get(wanted.handoff),
        handoff_at=wanted.handoff_at if wanted.HasField("handoff_at") else None,
    )


def _response(delta: Delta, requests: tuple[GenerationRequest, ...], said: ChoiceLog) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        tokens=[record_to_proto(record) for record in delta.records],
        text=delta.text,
        origin=_ORIGINS[delta.origin],
        finish_reason=finish_reason_to_proto(delta.finish_reason),
        prompt_tokens=[record_to_proto(record) for record in delta.prompt_records or ()],
    )
    if delta.finish_reason is not None:
        total = usage(requests, (said,), 1)
        response.usage.CopyFrom(inference_pb2.Usage(**asdict(total)))
        if delta.timeline is not None:
            response.timeline.CopyFrom(inference_pb2.Timeline(**asdict(delta.timeline)))
    return response


async def _abort(context: Context, error: PddError) -> NoReturn:
    trailing: list[tuple[str, str]] = [("pdd-field", error.field)] if error.field else []
    if (wait_s := retry_after_s(error)) is not None:
        trailing.append(("retry-after", str(wait_s)))
    await context.abort(grpc.StatusCode[error.code.name], public_message(error), tuple(trailing))
