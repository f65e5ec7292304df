"""A coordinator that speaks from a script: tokens that follow from the request alone, and failures, pauses and held-back text on demand."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pdd.errors import PddError
from pdd.serving.request import Delta, GenerationRequest, Timeline
from pdd.serving.text.model import TextModel
from pddbridge.sampling_params import FinishReason, TokenRecord
from tests.support.tiny_models import NUM_BASE_TOKENS

TIMELINE = Timeline(
    pipeline="relay",
    pipeline_reason="scripted",
    handoff="one_shot",
    relay_tokens=2,
    main_tokens=3,
    wan_kv_bytes=4096,
    wan_kv_wire_bytes=3072,
    wan_kv_tokens=17,
    main_hit_tokens=5,
    main_prefill_tokens=0,
    prefill_done_s=0.1,
    relay_kv_s=0.2,
    main_kv_s=0.3,
    handoff_start_s=0.4,
    handoff_done_s=0.5,
    ttft_s=0.25,
    second_token_s=0.26,
    e2e_s=0.9,
    max_itl_s=0.05,
    fallbacks=0,
)


@dataclass(frozen=True)
class Limits:
    model_name: str = "tiny"
    max_context_tokens: int = 512
    vocab_size: int = 300


@dataclass
class Script:
    """``tokens``: what to say instead of what follows from the request. ``fail_at``: raise ``error`` in place of that position's token.
    ``pause_at``: wait for ``resume`` before that position's token. ``hold``: text comes with every ``hold``-th token only."""

    tokens: tuple[int, ...] | None = None
    relay_tokens: int = 2
    finish_reason: FinishReason = "length"
    fail_at: int | None = None
    error: Exception | None = None
    pause_at: int | None = None
    hold: int = 1
    silent_end: bool = False
    wide_logprobs: bool = False


class ScriptedCoordinator:
    """``requests`` in order of arrival; ``running`` are those whose generator is open."""

    def __init__(self, text: TextModel, script: Script | None = None, limits: Limits | None = None) -> None:
        self.text = text
        self.script = script or Script()
        self.limits = limits or Limits()
        self.resume = asyncio.Event()
        self.requests: list[GenerationRequest] = []
        self.running: set[str] = set()
        self.num_tokens_made = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        script = self.script
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            tokens = script.tokens or expected_tokens(request)
            tokens = tokens[: request.sampling.max_tokens]
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            text, offset = "", 0
            for position, token_id in enumerate(tokens):
                if position == script.pause_at:
                    await self.resume.wait()
                if position == script.fail_at and script.error is not None:
                    raise script.error
                await asyncio.sleep(0)
                self.num_tokens_made += 1
                last = position == len(tokens) - 1
                text += decoder.decode(self.text.token_bytes(token_id), final=last)
                released, text = (text, "") if last or (position + 1) % script.hold == 0 else ("", text)
                yield Delta(
                    records=(self._record(request, position, token_id),),
                    text=released,
                    text_offset=offset,
                    origin="relay" if position < script.relay_tokens else "main",
                    finish_reason=script.finish_reason if last and not script.silent_end else None,
                    timeline=dataclasses.replace(TIMELINE, main_tokens=max(0, len(tokens) - 2)) if last and not script.silent_end else None,
                )
                offset += len(released)
        finally:
            self.running.discard(request.request_id)

    def _record(self, request: GenerationRequest, position: int, token_id: int) -> TokenRecord:
        wanted = request.sampling.num_logprobs
        if wanted is None:
            return TokenRecord(token_id)
        worst = float("-inf") if self.script.wide_logprobs else -9.0
        top = tuple((other, worst if other == wanted - 1 else -1.0 - other) for other in range(wanted))
        return TokenRecord(token_id, -0.5 - position, top)


def expected_tokens(request: GenerationRequest) -> tuple[int, ...]:
    """Letters that depend on prompt, seed and position; as many as ``max_tokens``."""
    start = (sum(request.prompt_ids) * 31 + request.sampling.seed) % 26
    letters = [(start + position * 7) % 26 for position in range(request.sampling.max_tokens)]
    return tuple(letter_id(chr(ord("a") + letter)) for letter in letters)


def letter_id(letter: str) -> int:
    """The byte token of an ASCII character in the tiny tokenizer."""
    return byte_id(ord(letter))


def byte_id(byte: int) -> int:
    assert 0 <= byte < 256
    return NUM_BASE_TOKENS - 256 + byte


def failure(error: PddError, position: int) -> Script:
    return Script(fail_at=position, error=error)
