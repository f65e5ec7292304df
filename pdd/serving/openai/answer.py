"""From deltas to an answer: one JSON body, or server-sent events. The same for both endpoints; the Shape words the choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict

from pdd.errors import PddError
from pdd.serving.choice_log import ChoiceLog, usage
from pdd.serving.front import Front
from pdd.serving.openai.errors import error_body, internal
from pdd.serving.openai.params import Call
from pdd.serving.openai.prompt_parts import Echo, echo_of, vllm_prompt_logprobs
from pdd.serving.openai.shape import Shape
from pdd.serving.openai.sse import DONE, event
from pdd.serving.request import Delta, GenerationRequest
from pdd.serving.streams import interleave

Json = dict[str, object]


async def whole_answer(call: Call, requests: Sequence[GenerationRequest], front: Front, shape: Shape) -> Json:
    """The body of a call that does not stream. Raises PddError."""
    echoes = _echoes(call, requests, front)
    logs = _logs(requests, echoes, front)
    async with aclosing(interleave([front.generator.generate(request) for request in requests])) as deltas:
        async for index, delta in deltas:
            logs[index].accept(delta)
    body = _envelope(call, front, shape.whole_object)
    for index, log in enumerate(logs):  # only the first choice of a prompt scored it
        log.prompt_records = log.prompt_records or logs[index - index % call.wish.num_choices].prompt_records
    body["choices"] = [_whole_choice(call, index, log, shape, echo) for index, (log, echo) in enumerate(zip(logs, echoes, strict=True))]
    if call.prompt_logprobs is not None:
        _add_prompt_logprobs(body, call, logs, front)
    body["usage"] = _usage(call, requests, logs)
    if call.report_timeline:
        body["pdd"] = {"timeline": _timeline(logs[0])}
    return body


async def stream_answer(call: Call, requests: Sequence[GenerationRequest], front: Front, shape: Shape) -> AsyncGenerator[bytes, None]:
    """Events of a call that streams. A failure before the first event is raised (PddError), so that it still gets its HTTP status; a
    later one becomes an error event, after which the stream ends without [DONE]. Closing it closes every generation first."""
    echoes = _echoes(call, requests, front)
    logs = _logs(requests, echoes, front)
    started = False
    try:
        async with aclosing(interleave([front.generator.generate(request) for request in requests])) as deltas:
            async for index, delta in deltas:
                for chunk in _chunks(call, front, shape, index, delta, logs[index], echoes[index]):
                    started = True
                    yield event(chunk)
        for log in logs:
            log.end()
        if call.include_usage:
            yield event({**_envelope(call, front, shape.chunk_object), "choices": [], "usage": _usage(call, requests, logs)})
        yield DONE
    except Exception as error:
        if not started:
            raise
        yield event(error_body(error if isinstance(error, PddError) else internal(error)))


def _echoes(call: Call, requests: Sequence[GenerationRequest], front: Front) -> list[Echo | None]:
    """One per choice."""
    if not call.echo:
        return [None] * len(requests)
    count = call.wish.num_choices
    return [echo_of(front.text, call.wish.prompts[index // count], request.prompt_ids) for index, request in enumerate(requests)]


def _logs(requests: Sequence[GenerationRequest], echoes: Sequence[Echo | None], front: Front) -> list[ChoiceLog]:
    pairs = zip(requests, echoes, strict=True)
    return [ChoiceLog(front.text, request, 0 if echo is None else len(echo.text)) for request, echo in pairs]


def _add_prompt_logprobs(body: Json, call: Call, logs: Sequence[ChoiceLog], front: Front) -> None:
    """Where vLLM has them: in each choice of a completion, once in a chat's answer."""
    assert call.prompt_logprobs is not None
    shown = [vllm_prompt_logprobs(front.text, log.prompt_records or (), call.prompt_logprobs) for log in logs]
    choices = body["choices"]
    assert isinstance(choices, list)
    if call.wish.field == "messages":
        body["prompt_logprobs"] = shown[0]
    else:
        for choice, found in zip(choices, shown, strict=True):
            choice["prompt_logprobs"] = found


def _chunks(call: Call, front: Front, shape: Shape, index: int, delta: Delta, log: ChoiceLog, echo: Echo | None) -> Iterator[Json]:
    """Puts ``delta`` into ``log``; up to three chunks result: the opening of the choice, its new part, its end."""
    opening = None if log.begun else shape.opening(index)
    echo = None if log.begun else echo
    first = len(log.records)
    log.accept(delta)
    if opening is not None:
        yield _chunk(call, front, shape, opening)
    has_tokens = bool(delta.records)
    if echo is not None:
        logprobs = shape.logprobs_of(log, len(log.records), echo) if call.want_logprobs else None
        yield _chunk(call, front, shape, shape.part(index, echo.text, logprobs))
    if delta.text or (has_tokens and (call.want_logprobs or call.report_origin)):
        logprobs = shape.logprobs_of(log, first) if call.want_logprobs else None
        choice = shape.part(index, delta.text, logprobs)
        if call.report_origin:
            choice["pdd"] = {"origin": delta.origin, "token_ids": [record.token_id for record in delta.records]}
        yield _chunk(call, front, shape, choice)
    if delta.finish_reason is not None:
        chunk = _chunk(call, front, shape, shape.closing(index, delta.finish_reason))
        if call.report_timeline:
            chunk["pdd"] = {"timeline": _timeline(log)}
        yield chunk


def _chunk(call: Call, front: Front, shape: Shape, choice: Json) -> Json:
    chunk = {**_envelope(call, front, shape.chunk_object), "choices": [choice]}
    if call.include_usage:
        chunk["usage"] = None  # OpenAI: every chunk but the last one has it as null
    return chunk


def _envelope(call: Call, front: Front, kind: str) -> Json:
    return {"id": call.wish.call_id, "object": kind, "created": call.created_s, "model": front.generator.limits.model_name}


def _whole_choice(call: Call, index: int, log: ChoiceLog, shape: Shape, echo: Echo | None) -> Json:
    finish_reason = log.end()
    text = log.text if echo is None else echo.text + log.text
    choice = shape.whole(index, text, shape.logprobs_of(log, 0, echo) if call.want_logprobs else None, finish_reason)
    ours: Json = {}
    if call.report_origin:
        ours |= {"origins": [list(run) for run in log.origins], "token_ids": log.token_ids}
    if call.report_timeline:
        ours["timeline"] = _timeline(log)
    return {**choice, "pdd": ours} if ours else choice


def _timeline(log: ChoiceLog) -> Json | None:
    return None if log.timeline is None else asdict(log.timeline)


def _usage(call: Call, requests: Sequence[GenerationRequest], logs: Sequence[ChoiceLog]) -> Json:
    total = usage(requests, logs, call.wish.num_choices)
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
    }
