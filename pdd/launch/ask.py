"""Ask a running endpoint one question over HTTP and keep what came back, token by token. The client side of the OpenAI door."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One streamed chunk that carried tokens: its text, who made them, their ids, when it came (seconds after the request was sent)."""

    text: str
    origin: str
    token_ids: tuple[int, ...]
    at_s: float

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Answer:
    """``timeline`` as the endpoint reported it (see pdd.v1.Timeline)."""

    pieces: tuple[Piece, ...]
    timeline: dict[str, str | int | float | None]
    usage: dict[str, object]
    finish_reason: str

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def tokens_by(self, origin: str) -> int:
        return sum(piece.num_tokens for piece in self.pieces if piece.origin == origin)


class AskError(Exception):
    """The endpoint refused or broke off; the message is its own."""


@dataclass(frozen=True)
class Access:
    """``ca``: PEM file of the authority of an https endpoint; None: the system's. ``key``: API key."""

    ca: str | None = None
    key: str | None = None


def ask(
    url: str,
    body: dict[str, object],
    on_piece: Callable[[Piece], None] | None = None,
    timeout_s: float = 300.0,
    access: Access = Access(),
) -> Answer:
    """POST ``body`` to ``url`` (/v1/chat/completions or /v1/completions) as a stream with origins and timeline."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    wanted = body.get("pdd")
    body["pdd"] = {**(wanted if isinstance(wanted, dict) else {}), "report_origin": True, "timeline": True}
    headers = {"Content-Type": "application/json"}
    if access.key is not None:
        headers["Authorization"] = f"Bearer {access.key}"
    context = ssl.create_default_context(cafile=access.ca) if url.startswith("https:") else None
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    sent_s = time.perf_counter()
    pieces: list[Piece] = []
    timeline: dict[str, str | int | float | None] = {}
    usage: dict[str, object] = {}
    finish_reason = ""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                chunk = json.loads(line[len(b"data: ") :])
                if "error" in chunk:
                    raise AskError(chunk["error"]["message"])
                usage = chunk.get("usage") or usage
                timeline = chunk.get("pdd", {}).get("timeline") or timeline
                for choice in chunk["choices"]:
                    finish_reason = choice.get("finish_reason") or finish_reason
                    timeline = choice.get("pdd", {}).get("timeline") or timeline
                    piece = _piece(choice, time.perf_counter() - sent_s)
                    if piece is not None:
                        pieces.append(piece)
                        if on_piece is not None:
                            on_piece(piece)
    except urllib.error.HTTPError as error:
        raise AskError(_message(error.read())) from error
    except OSError as error:
        raise AskError(f"{url}: {error}") from error
    if not finish_reason:
        raise AskError("the stream ended without a finish reason")
    return Answer(tuple(pieces), timeline, usage, finish_reason)


def _piece(choice: dict[str, object], at_s: float) -> Piece | None:
    extra = choice.get("pdd")
    if not isinstance(extra, dict) or "origin" not in extra:
        return None
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return Piece(str(text or ""), str(extra["origin"]), tuple(extra.get("token_ids", ())), at_s)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:200]
