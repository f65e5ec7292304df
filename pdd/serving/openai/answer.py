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
from pdd.serving.openai.shape import Shape
from pdd.serving.openai.sse import DONE, event
from pdd.serving.request import Delta, GenerationRequest
from pdd.serving.streams import interleave

Json = dict[str, object]


async def whole_answer(call: Call, requests: Sequence[GenerationRequest], front: Front, shape: Shape) -> Json:
    """The body of a call that does not stream. Raises PddError."""
    logs = [ChoiceLog(front.text, request.prompt_ids) for request in requests]
    async with aclosing(interleave([front.generator.generate(request) for request in requests])) as deltas:
        async for index, delta in deltas:
            logs[index].accept(delta)
    body = _envelope(call, front, shape.whole_object)
    body["choices"] = [_whole_choice(call, index, log, shape) for index, log in enumerate(logs)]
    body["usage"] = _usage(call, requests, logs)
    if call.report_timeline:
        body["pdd"] = {"timeline": _timeline(logs[0])}
    return body


async def stream_answer(call: Call, requests: Sequence[GenerationRequest], front: Front, shape: Shape) -> AsyncGenerator[bytes, None]:
    """Events of a call that streams. A failure before the first event is raised (PddError), so that it still gets its HTTP status; a
    later one becomes an error event, after which the stream ends without [DONE]. Closing it closes every generation first."""
    logs = [ChoiceLog(front.text, request.prompt_ids) for request in requests]
    started = False
    try:
        async with aclosing(interleave([front.generator.generate(request) for request in requests])) as deltas:
            async for index, delta in deltas:
                for chunk in _chunks(call, front, shape, index, delta, logs[index]):
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


def _chunks(call: Call, front: Front, shape: Shape, index: int, delta: Delta, log: ChoiceLog) -> Iterator[Json]:
    """Puts ``delta`` into ``log``; up to three chunks result: the opening of the choice, its new part, its end."""
    opening = None if log.begun else shape.opening(index)
    first = len(log.records)
    log.accept(delta)
    if opening is not None:
        yield _chunk(call, front, shape, opening)
    has_tokens = bool(delta.records)
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


def _whole_choice(call: Call, index: int, log: ChoiceLog, shape: Shape) -> Json:
    finish_reason = log.end()
    choice = shape.whole(index, log.text, shape.logprobs_of(log, 0) if call.want_logprobs else None, finish_reason)
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
