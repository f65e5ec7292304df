"""An :class:`Ask` as the bodies that the two doors take."""

from __future__ import annotations

from pdd.chaos.traffic import Ask
from pddbridge.rpc.gen import common_pb2, inference_pb2


def http_body(ask: Ask) -> dict[str, object]:
    """What asks for exactly this over the OpenAI door."""
    wish = ask.wish
    ours: dict[str, object] = {"report_origin": True, "timeline": True}
    if ask.pipeline is not None:
        ours["pipeline"] = ask.pipeline
    if ask.handoff_at is not None:
        ours["handoff_at"] = ask.handoff_at
    if ask.handoff is not None:
        ours["handoff"] = ask.handoff
    body: dict[str, object] = {
        "prompt": list(ask.prompt),
        "seed": ask.seed,
        "stream": ask.stream,
        "cache_salt": ask.salt,
        "ignore_eos": wish.ignore_eos,
        "logit_bias": {str(token): bias for token, bias in wish.logit_bias},
        "pdd": ours,
        **_numbers(ask),
    }
    if ask.stop:
        body["stop"] = list(ask.stop)
    if ask.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def grpc_body(ask: Ask) -> inference_pb2.GenerateRequest:
    """What asks for exactly this over the gRPC door."""
    body = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ask.prompt),
        seed=ask.seed,
        stop=ask.stop,
        cache_salt=ask.salt,
        ignore_eos=ask.wish.ignore_eos,
        logit_bias=[common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in ask.wish.logit_bias],
        override=inference_pb2.PipelineOverride(pipeline=ask.pipeline or "", handoff=ask.handoff or "", handoff_at=ask.handoff_at),
    )
    for name, value in _numbers(ask).items():
        setattr(body, name, value)
    return body


def _numbers(ask: Ask) -> dict[str, int | float]:
    wish = ask.wish
    given = {
        "max_tokens": wish.max_tokens,
        "temperature": wish.temperature,
        "top_k": wish.top_k,
        "top_p": wish.top_p,
        "repetition_penalty": wish.repetition_penalty,
        "frequency_penalty": wish.frequency_penalty,
    }
    return {name: value for name, value in given.items() if value is not None}
