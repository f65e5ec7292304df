"""Log-probability records in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from pdd.serving.text.model import TextModel
from pddbridge.sampling_params import TokenRecord

LOWEST = -9999.0  # JSON has no -inf; OpenAI and vLLM send this for a token that could not have been chosen


def chat_logprobs(text: TextModel, records: Sequence[TokenRecord]) -> dict[str, object]:
    """{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}"""
    content = [
        {**_chat_entry(text, record.token_id, record.logprob), "top_logprobs": [_chat_entry(text, *top) for top in record.top_logprobs]}
        for record in records
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(text: TextModel, records: Sequence[TokenRecord], offsets: Sequence[int]) -> dict[str, object]:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}, one entry per token. The chosen token is always among its top
    ones, as in OpenAI's; of tokens that look alike the likeliest stays. null for the first token of an echoed prompt: nothing led to it."""
    tops: list[dict[str, float] | None] = []
    for record in records:
        if record.logprob is None:
            tops.append(None)
            continue
        top = {shown_token(text, record.token_id): _finite(record.logprob)}
        for token_id, logprob in record.top_logprobs:
            top.setdefault(shown_token(text, token_id), _finite(logprob))
        tops.append(top)
    return {
        "tokens": [shown_token(text, record.token_id) for record in records],
        "token_logprobs": [None if record.logprob is None else _finite(record.logprob) for record in records],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def shown_token(text: TextModel, token_id: int) -> str:
    """The token's text; where its bytes are no UTF-8 by themselves, "bytes:\\xf0\\x9f", as OpenAI shows them."""
    data = text.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_entry(text: TextModel, token_id: int, logprob: float | None) -> dict[str, object]:
    return {"token": shown_token(text, token_id), "logprob": _finite(logprob), "bytes": list(text.token_bytes(token_id))}


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "logprobs were asked for, so the worker recorded them"
    return max(logprob, LOWEST)
