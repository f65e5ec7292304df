"""One request to an OpenAI-compatible endpoint as a stream, and what its stream did: first token, gaps, end, or why it failed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import httpx

Backend = Literal["openai", "openai-chat"]
Timeline = dict[str, str | int | float | None]


@dataclass(frozen=True)
class Target:
    """``speaks_pdd``: the endpoint tells origins and timelines when asked · ``headers``: sent with every request · ``extra_body``: goes
    over what we would send.
    """

    base_url: str
    endpoint: str
    backend: Backend
    model: str
    speaks_pdd: bool
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, object] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + self.endpoint


@dataclass
class Record:
    """What happened to one request. Seconds since the run began (``start_s``) or since it was sent (the rest). ``error``: empty when it
    ended well · ``pieces``: (seconds, tokens) of each streamed chunk · ``token_ids``: of the answer, where the endpoint told them ·
    ``timeline``: as PDD reports it.
    """

    session: str
    turn: int
    start_s: float
    prompt_tokens: int
    pieces: list[tuple[float, int]] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    e2e_s: float = 0.0
    error: str = ""
    timeline: Timeline = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.pieces[0][0]

    @property
    def itls_s(self) -> list[float]:
        return [b - a for (a, _), (b, _) in zip(self.pieces, self.pieces[1:], strict=False)]


def client(target: Target, timeout_s: float) -> httpx.AsyncClient:
    """As many connections as there are requests: waiting for a connection would be time that is nobody's."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(headers=target.headers, timeout=httpx.Timeout(timeout_s, connect=30.0), limits=limits, trust_env=False)


async def speaks_pdd(base_url: str, headers: dict[str, str]) -> bool:
    """Whether the models of the endpoint are served by PDD. Raises ValueError, one line, when it does not answer."""
    url = base_url.rstrip("/") + "/v1/models"
    try:
        async with httpx.AsyncClient(trust_env=False) as asking:
            answer = await asking.get(url, headers=headers, timeout=10.0)
            models = answer.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ValueError(f"{url}: no list of models: {type(error).__name__} {error}") from error
    return any(model.get("owned_by") == "pdd" for model in models)


async def send(
    http: httpx.AsyncClient, target: Target, record: Record, body: dict[str, object], clock: Callable[[], float] = time.perf_counter
) -> None:
    """Send ``body`` and fill ``record``; a failure is told there."""
    sent_s = clock()
    try:
        async with http.stream("POST", target.url, json=_with_options(target, body)) as response:
            if response.status_code != 200:
                record.error = f"HTTP {response.status_code}: {_message(await response.aread())}"
            else:
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        _take(record, json.loads(line[len("data: ") :]), clock() - sent_s)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.e2e_s = clock() - sent_s
    if not record.error and not record.finish_reason:
        record.error = "the stream ended without a finish reason"
    if not record.error and not record.pieces:
        record.error = "no token came"
    if not record.output_tokens:
        record.output_tokens = sum(tokens for _, tokens in record.pieces)


def _with_options(target: Target, body: dict[str, object]) -> dict[str, object]:
    ours: dict[str, object] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    if target.speaks_pdd:
        ours["pdd"] = {"report_origin": True, "timeline": True}
    return {**ours, **body, **target.extra_body}


def _take(record: Record, chunk: dict[str, object], at_s: float) -> None:
    error = chunk.get("error")
    if error is not None:
        record.error = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        record.output_tokens = int(usage.get("completion_tokens") or 0)
        record.prompt_tokens = int(usage.get("prompt_tokens") or record.prompt_tokens)
        details = usage.get("prompt_tokens_details")
        record.cached_tokens = int((details or {}).get("cached_tokens") or 0)
    _timeline(record, chunk)
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
        _timeline(record, choice)
        delta = choice.get("delta")
        text = (delta.get("content") if isinstance(delta, dict) else choice.get("text")) or ""
        ids = (choice.get("pdd") or {}).get("token_ids") or []
        if text or ids:
            record.pieces.append((at_s, len(ids) or 1))
            record.token_ids.extend(ids)
            record.text += text


def _timeline(record: Record, part: dict[str, object]) -> None:
    ours = part.get("pdd")
    if isinstance(ours, dict) and ours.get("timeline"):
        record.timeline = ours["timeline"]


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:200]
